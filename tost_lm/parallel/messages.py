"""Messages between background threads of ranks, since collectives belong to the main thread."""

import json
import threading
import time
from contextlib import suppress

import torch.distributed as dist

from tost_lm.parallel.watchdog.store import StoreTimeoutError, TimeoutStore

MIN_PAUSE_S, MAX_PAUSE_S = 0.05, 0.5  # between two requests of a thread that waits: all ranks share one store


class NoMessageError(Exception):
    """A message did not arrive; the text gives the reason."""


class ThreadMessages:
    """Short texts for all ranks, each under a key and a number; all ranks create it together.

    Both methods raise torch.distributed.DistError if the store is lost.
    """

    def __init__(self, name: str) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._store = TimeoutStore(name) if self.size > 1 else None

    def write(self, key: str, number: int, text: str) -> None:
        """Publish a text."""
        if self._store:
            self._store.set(f"{number}/{key}", json.dumps(text))

    def read(self, key: str, number: int, timeout_s: float) -> str:
        """Wait for another rank's text. Raises NoMessageError after `timeout_s`, or if the main thread has ended."""
        assert self._store, "a single rank has no messages"
        deadline, pause = time.monotonic() + timeout_s, MIN_PAUSE_S
        while threading.main_thread().is_alive() and time.monotonic() < deadline:
            with suppress(StoreTimeoutError):  # it may recover
                if text := self._store.get(f"{number}/{key}"):
                    return json.loads(text)
            time.sleep(pause)
            pause = min(1.5 * pause, MAX_PAUSE_S)
        raise NoMessageError(f"no message within {timeout_s:g} s")
