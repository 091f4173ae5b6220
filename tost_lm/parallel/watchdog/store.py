"""The process group's key-value store with a timeout for each request."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import _get_default_store

RESPONSE_S = 3.0  # timeout of a request

Response = TypeVar("Response")


class StoreTimeoutError(dist.DistStoreError):
    """The store does not respond on an open connection: its host is cut off, or its process was stopped."""


class TimeoutStore:
    """Keys of the process group's store under a prefix, over a connection and a thread of its own.

    torch's store waits without limit, or for the rendezvous timeout. Each method here raises
    torch.distributed.DistError if the connection is broken, and StoreTimeoutError after RESPONSE_S.
    """

    def __init__(self, prefix: str) -> None:
        # A separate connection: a waiting request blocks the others on its connection.
        self._store = PrefixStore(prefix, _get_default_store().clone())  # pyright: ignore[reportAttributeAccessIssue]
        self._requests: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._pending_since: float | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def set(self, key: str, value: str) -> None:
        self._request(lambda: self._store.set(key, value))

    def get(self, key: str) -> str | None:
        """The value of a key; None: it is not set."""
        return self._request(lambda: self._store.get(key).decode() if self._store.check([key]) else None)

    def has(self, *keys: str) -> bool:
        """Whether all keys are set."""
        return self._request(lambda: self._store.check(list(keys)))

    def add(self, key: str, amount: int) -> int:
        return self._request(lambda: self._store.add(key, amount))

    def set_if_new(self, key: str, value: str) -> None:
        self._request(lambda: self._store.compare_set(key, "", value))

    def close(self) -> None:
        """End the thread, unless it still waits for a response."""
        self._requests.put(None)
        if self._pending_since is None:
            self._thread.join(RESPONSE_S)

    def _request(self, request: Callable[[], Response]) -> Response:
        pending_since = self._pending_since
        if pending_since is None or time.monotonic() - pending_since < RESPONSE_S:
            response: Future[Response] = Future()
            self._requests.put((request, response))
            try:
                return response.result(RESPONSE_S)
            except TimeoutError:
                response.cancel()
        raise StoreTimeoutError(f"the store has not responded for {RESPONSE_S} s")

    def _serve(self) -> None:
        while item := self._requests.get():
            request, response = item
            if not response.set_running_or_notify_cancel():
                continue
            self._pending_since = time.monotonic()
            try:
                response.set_result(request())
            except Exception as error:
                response.set_exception(error)
            self._pending_since = None
