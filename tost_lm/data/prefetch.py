"""From the arrays of the loader to the micro-batches of a rank, read ahead by threads."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from itertools import islice, pairwise
from queue import SimpleQueue
from threading import Event, Thread
from typing import NamedTuple

import torch
from torch import Tensor

from tost_lm.data.loader import Batch, TrainingBatches

WAIT_S = 0.25
"""For a batch, until `while_waiting` is called."""
READ_AHEAD = 2
"""Batches for each thread."""
LEAVE_S = 1.0
"""For threads to end; a read that takes longer is abandoned."""


class MicroBatch(NamedTuple):
    """The inputs of one model call, on the training device; `cu_seqlens` is on the host."""

    tokens: Tensor
    """int64 [B, T], or the sequence shard of this rank."""
    labels: Tensor
    """int64, as tokens."""
    cu_seqlens: Tensor | None = None
    """Offsets of the documents packed into one full row, int32 [documents + 1]; None: each row is a document."""

    def document_lengths(self, row_tokens: int) -> list[int]:
        """Tokens of each document on all sequence ranks together, whose rows have `row_tokens`."""
        return [row_tokens] * len(self.tokens) if self.cu_seqlens is None else self.cu_seqlens.diff().tolist()


class _HostBatch(NamedTuple):
    """A batch in the host's memory, which is pinned for CUDA."""

    tokens: Tensor
    """int32 [A, B, L], as in `Batch`."""
    labels: Tensor
    cu_seqlens: list[Tensor] | list[None]
    """Of each micro-batch."""


class _Request(NamedTuple):
    step: int
    answer: Future[_HostBatch]


def micro_batches(batch: Batch, device: torch.device) -> list[MicroBatch]:
    """The micro-batches of a rank's `batch` on `device`."""
    return _copied(_on_host(batch, device), device)


def _on_host(batch: Batch, device: torch.device) -> _HostBatch:
    tokens, labels = (torch.as_tensor(x) for x in (batch.tokens, batch.labels))
    if device.type == "cuda":
        with torch.cuda.device(device):  # not the first GPU, with which a thread begins
            tokens, labels = tokens.pin_memory(), labels.pin_memory()
    return _HostBatch(tokens, labels, _cu_seqlens(torch.as_tensor(batch.document_ends), len(tokens)))


def _copied(batch: _HostBatch, device: torch.device) -> list[MicroBatch]:
    tokens, labels = (x.to(device, non_blocking=True).long() for x in (batch.tokens, batch.labels))
    return [MicroBatch(*fields) for fields in zip(tokens, labels, batch.cu_seqlens, strict=True)]


def _cu_seqlens(document_ends: Tensor, rows: int) -> list[Tensor] | list[None]:
    if not len(document_ends):
        return [None] * rows
    row_tokens = int(document_ends[-1]) // rows
    offsets = torch.cat([document_ends.new_zeros(1), document_ends])
    edges = torch.searchsorted(offsets, torch.arange(rows + 1) * row_tokens).tolist()
    return [(offsets[start : end + 1] - offsets[start]).int() for start, end in pairwise(edges)]


@contextmanager
def prefetched(
    batches: TrainingBatches,
    steps: range,
    workers: int,
    device: torch.device,
    while_waiting: Callable[[], None] = lambda: None,
) -> Iterator[Iterator[tuple[int, list[MicroBatch]]]]:
    """Each step with its micro-batches, which `workers` threads read ahead (0: read in this thread).

    Use it around the training that consumes the batches. On exit the threads end, but not one whose read does not
    return: it does not keep the process from ending.

    Args:
        while_waiting: called every WAIT_S in which the next batch is not read; it may raise.

    Raises:
        DataError: a shard is damaged; at the step that needs it, as any other error of a thread.
    """
    if not workers:
        yield ((step, micro_batches(batches[step], device)) for step in steps)
        return
    requests = SimpleQueue[_Request | None]()
    is_over = Event()
    arguments = (batches, device, requests, is_over)
    threads = [Thread(target=_read, args=arguments, name=f"reader {n}", daemon=True) for n in range(workers)]
    for thread in threads:
        thread.start()
    try:
        yield _each_step(steps, requests, READ_AHEAD * workers, device, while_waiting)
    finally:
        is_over.set()
        for _ in threads:
            requests.put(None)
        deadline = time.monotonic() + LEAVE_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _each_step(
    steps: range,
    requests: SimpleQueue[_Request | None],
    ahead: int,
    device: torch.device,
    while_waiting: Callable[[], None],
) -> Iterator[tuple[int, list[MicroBatch]]]:
    todo, asked = iter(steps), deque[_Request]()
    while True:
        for step in islice(todo, ahead + 1 - len(asked)):
            asked.append(_Request(step, Future()))
            requests.put(asked[-1])
        if not asked:
            return
        step, answer = asked.popleft()
        while not wait([answer], WAIT_S).done:
            while_waiting()
        yield step, _copied(answer.result(), device)


def _read(
    batches: TrainingBatches, device: torch.device, requests: SimpleQueue[_Request | None], is_over: Event
) -> None:
    while (request := requests.get()) and not is_over.is_set():
        try:
            request.answer.set_result(_on_host(batches[request.step], device))
        except BaseException as error:
            request.answer.set_exception(error)
