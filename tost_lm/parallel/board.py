"""What background threads of the ranks tell each other: collectives are the main thread's alone."""

import itertools
import threading
import time

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import _get_default_store

LOOK_S = 0.05  # between two looks at the store
_uses = itertools.count()  # the store keeps what an earlier use said


class NoWordError(Exception):
    """A rank was waited for in vain; the message says why."""


class Board:
    """Short texts that every rank can read, each under a key; all ranks make it together.

    What is written for a round replaces what the same key held for earlier ones.
    """

    def __init__(self, name: str) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # A connection of its own: a request that waits holds up the others on its connection.
        store = _get_default_store().clone() if self.size > 1 else HashStore()  # pyright: ignore[reportAttributeAccessIssue]
        self._store = PrefixStore(f"tost_lm/{name}/{next(_uses)}", store)

    def write(self, key: str, number: int, text: str) -> None:
        """Put up a text of round `number`. Raises NoWordError when the store is gone."""
        try:
            self._store.set(key, f"{number} {text}")
        except dist.DistError:
            raise NoWordError("the store through which the ranks meet was lost") from None

    def read(self, key: str, number: int, timeout_s: float) -> str:
        """The text of round `number`, as soon as it is there.

        Raises:
            NoWordError: it is not within `timeout_s`, the store is gone, or the main thread has ended meanwhile.
        """
        deadline = time.monotonic() + timeout_s
        try:
            while threading.main_thread().is_alive():
                if self._store.check([key]):
                    found, _, text = self._store.get(key).decode().partition(" ")
                    if int(found) == number:
                        return text
                if time.monotonic() > deadline:
                    raise NoWordError(f"no word within {timeout_s:g} s")
                time.sleep(LOOK_S)
        except dist.DistError:
            raise NoWordError("the store through which the ranks meet was lost") from None
        raise NoWordError("the run ended before")
