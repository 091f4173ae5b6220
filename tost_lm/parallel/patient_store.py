"""The process group's store for those who cannot wait: a request is given up after a while."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import _get_default_store

ANSWER_S = 3.0  # what the store may take to answer

Answer = TypeVar("Answer")


class SilentStoreError(dist.DistStoreError):
    """The store does not answer, though its connection is open: its host is cut off, or its process was stopped."""


class PatientStore:
    """Keys of the process group's store behind a prefix, over a connection and a thread of its own.

    torch's store waits for its host without limit, in some calls, or for as long as the rendezvous may take. Each
    method raises torch.distributed.DistError when the connection is broken, and SilentStoreError after ANSWER_S.
    """

    def __init__(self, prefix: str) -> None:
        # A connection of its own: a request that waits holds up the others on its connection.
        self._store = PrefixStore(prefix, _get_default_store().clone())  # pyright: ignore[reportAttributeAccessIssue]
        self._requests: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._asked_at: float | None = None  # of the request on its way
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> str | None:
        """What the key holds; None: it was never set."""
        return self._ask(lambda: self._store.get(key).decode() if self._store.check([key]) else None)

    def holds(self, *keys: str) -> bool:
        """Whether all of them were set."""
        return self._ask(lambda: self._store.check(list(keys)))

    def add(self, key: str, amount: int) -> int:
        return self._ask(lambda: self._store.add(key, amount))

    def set_if_new(self, key: str, value: str) -> None:
        self._ask(lambda: self._store.compare_set(key, "", value))

    def close(self) -> None:
        """End the thread, unless it still waits for an answer."""
        self._requests.put(None)
        if self._asked_at is None:
            self._thread.join(ANSWER_S)

    def _ask(self, request: Callable[[], Answer]) -> Answer:
        asked_at = self._asked_at
        if asked_at is None or time.monotonic() - asked_at < ANSWER_S:
            answer: Future[Answer] = Future()
            self._requests.put((request, answer))
            try:
                return answer.result(ANSWER_S)
            except TimeoutError:
                answer.cancel()
        raise SilentStoreError(f"the store has not answered for {ANSWER_S} s")

    def _serve(self) -> None:
        while asked := self._requests.get():
            request, answer = asked
            if not answer.set_running_or_notify_cancel():
                continue
            self._asked_at = time.monotonic()
            try:
                answer.set_result(request())
            except Exception as error:
                answer.set_exception(error)
            self._asked_at = None
