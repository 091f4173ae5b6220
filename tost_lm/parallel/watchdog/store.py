"""The process group's key-value store with a timeout for each request."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from tost_lm.parallel.timeouts import STORE_S
from tost_lm.torch_internals import new_store_connection

_instances = count()  # the store keeps the keys of earlier instances


class StoreTimeoutError(dist.DistStoreError):
    """The store does not respond on an open connection: its host is cut off, or its process was stopped."""


class TimeoutStore:
    """Keys of the process group's store, apart from those of other instances; all ranks create it together.

    torch's store waits without limit, or for the rendezvous timeout. Each method here raises
    torch.distributed.DistError if the connection is broken, and StoreTimeoutError after STORE_S.
    """

    def __init__(self, name: str) -> None:
        # A connection of its own, because a waiting request blocks the others on its connection.
        self._store = PrefixStore(f"tost_lm/{name}/{next(_instances)}", new_store_connection())
        self._late: Future[Any] | None = None

    def set(self, key: str, value: str) -> None:
        self._request(lambda: self._store.set(key, value))

    def set_if_new(self, key: str, value: str) -> str:
        """Set a key that is not set. Returns its value, perhaps an earlier one."""
        return self._request(lambda: self._store.compare_set(key, "", value)).decode()

    def get(self, key: str) -> str:
        """The value of a key; empty: it is not set."""
        return self._request(lambda: self._store.get(key) if self._store.check([key]) else b"").decode()

    def _request(self, request: Callable[[], Any]) -> Any:
        if not self._late or self._late.done():
            response = Future[Any]()
            threading.Thread(target=_respond, args=(request, response), daemon=True).start()
            try:
                return response.result(STORE_S)
            except TimeoutError:
                self._late = response
        raise StoreTimeoutError(f"the store has not responded for {STORE_S:g} s")


def _respond(request: Callable[[], Any], response: Future[Any]) -> None:
    try:
        response.set_result(request())
    except Exception as error:
        response.set_exception(error)
