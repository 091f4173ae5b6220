"""What background threads of the ranks tell each other: collectives are the main thread's alone."""

import itertools
import threading
import time

import torch.distributed as dist

from tost_lm.parallel.patient_store import PatientStore, SilentStoreError

LOOK_S, LONGEST_LOOK_S = 0.05, 0.5  # between two looks at the store, which serves all ranks
_uses = itertools.count()  # the store keeps what an earlier use said


class NoWordError(Exception):
    """A rank was waited for in vain; the message says why."""


class Board:
    """Short texts that every rank can read, each under a key and the number of a round; all ranks make it together."""

    def __init__(self, name: str) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._store = PatientStore(f"tost_lm/{name}/{next(_uses)}") if self.size > 1 else None

    def write(self, key: str, number: int, text: str) -> None:
        """Put up a text. Raises NoWordError when the store is gone."""
        try:
            if self._store:
                self._store.set(f"{number}/{key}", text)
        except dist.DistError:
            raise NoWordError("the store through which the ranks meet was lost") from None

    def read(self, key: str, number: int, timeout_s: float) -> str:
        """The text of another rank, as soon as it is there.

        Raises:
            NoWordError: it is not within `timeout_s`, the store is gone, or the main thread has ended meanwhile.
        """
        assert self._store, "a rank alone has nobody to read from"
        deadline, pause = time.monotonic() + timeout_s, LOOK_S
        while threading.main_thread().is_alive():
            try:
                text = self._store.get(f"{number}/{key}")
            except SilentStoreError:
                text = None  # it may come back
            except dist.DistError:
                raise NoWordError("the store through which the ranks meet was lost") from None
            if text is not None:
                return text
            if time.monotonic() > deadline:
                raise NoWordError(f"no word within {timeout_s:g} s")
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_LOOK_S)
        raise NoWordError("the run ended before")
