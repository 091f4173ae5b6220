"""Messages between background threads of ranks, since collectives belong to the main thread."""

import itertools
import threading
import time

import torch.distributed as dist

from tost_lm.parallel.watchdog.store import StoreTimeoutError, TimeoutStore

MIN_POLL_S, MAX_POLL_S = 0.05, 0.5  # all ranks share one store
_instances = itertools.count()  # the store keeps the keys of earlier instances


class NoMessageError(Exception):
    """A message did not arrive; the text gives the reason."""


class ThreadMessages:
    """Short texts for all ranks, each under a key and a number; all ranks create it together."""

    def __init__(self, name: str) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._store = TimeoutStore(f"tost_lm/{name}/{next(_instances)}") if self.size > 1 else None

    def write(self, key: str, number: int, text: str) -> None:
        """Publish a text. Raises NoMessageError if the store is lost."""
        try:
            if self._store:
                self._store.set(f"{number}/{key}", text)
        except dist.DistError:
            raise NoMessageError("the rendezvous store was lost") from None

    def read(self, key: str, number: int, timeout_s: float) -> str:
        """Wait for another rank's text.

        Raises:
            NoMessageError: there is none within `timeout_s`, the store is lost, or the main thread has ended.
        """
        assert self._store, "a single rank has no messages"
        deadline, pause = time.monotonic() + timeout_s, MIN_POLL_S
        while threading.main_thread().is_alive():
            try:
                text = self._store.get(f"{number}/{key}")
            except StoreTimeoutError:
                text = None  # the store may recover
            except dist.DistError:
                raise NoMessageError("the rendezvous store was lost") from None
            if text is not None:
                return text
            if time.monotonic() > deadline:
                raise NoMessageError(f"no message within {timeout_s:g} s")
            time.sleep(pause)
            pause = min(1.5 * pause, MAX_POLL_S)
        raise NoMessageError("the run ended before")
