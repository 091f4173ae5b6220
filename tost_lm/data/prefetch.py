"""Batches made ahead of training by processes of their own, and what becomes of the run when one of those dies."""

import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tost_lm.data.loader import Batch, TrainingBatches
from tost_lm.errors import DataError

TORCH_SAYS = "DataLoader worker (pid"  # of a worker that is gone
PR_SET_PDEATHSIG = 1
ON_LINUX = sys.platform == "linux"  # elsewhere nothing tells who sent a signal, and torch ends orphans after 5 s
BLOCKED_IN_WORKERS = {signal.SIGINT, signal.SIGTERM} if ON_LINUX else {signal.SIGINT}


class MicroBatch(NamedTuple):
    """What one call of the model is given; on the training device but for `cu_seqlens`, which is read on the host."""

    tokens: Tensor
    """int64 [B, T], or this rank's columns of them."""
    labels: Tensor
    """int64, as tokens."""
    cu_seqlens: Tensor | None = None
    """Offsets of the documents packed into one whole row, int32 [documents + 1]; None: each row is a document."""


@contextmanager
def prefetched(
    batches: TrainingBatches, steps: range, workers: int, device: torch.device
) -> Iterator[Iterator[tuple[int, list[MicroBatch]]]]:
    """Each step with its micro-batches, made ahead by `workers` processes (0: none, when they are asked for).

    To be put around the training that uses them, in the main thread: a worker's death is seen wherever that is.

    Raises:
        DataError: a worker died. When this is left, the workers are gone.
    """
    loader = DataLoader(
        batches,  # pyright: ignore[reportArgumentType]
        batch_size=None,
        sampler=steps,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
        worker_init_fn=_belong_to_the_parent,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # else it would draw from the one that training draws from
    )
    try:
        iterator = _iterator_of(loader)
        try:
            yield _each_step(steps, iterator, device)
        finally:
            if workers:
                with _undisturbed():
                    iterator._shutdown_workers()
    except RuntimeError as error:
        if TORCH_SAYS not in str(error):
            raise
        line = str(error).strip().splitlines()[0].strip(" .")
        lost = DataError(
            f"data.workers: {line}, on {socket.gethostname()}; the same command goes on from the newest checkpoint "
            "(with data.workers=0 without workers)"
        )
        lost.printed_here = True  # at once: no other rank has this worker
        raise lost from None


def _each_step(steps: range, iterator: Iterator[Batch], device: torch.device) -> Iterator[tuple[int, list[MicroBatch]]]:
    for step in steps:
        with _undisturbed():
            batch = next(iterator)
        yield step, micro_batches(batch, device)


def micro_batches(batch: Batch, device: torch.device) -> list[MicroBatch]:
    """A rank's share of a step (of tensors, as the DataLoader makes them) in portions, on `device`."""
    tokens, labels = (torch.as_tensor(x).to(device, non_blocking=True).long() for x in (batch.tokens, batch.labels))
    cuts = _cu_seqlens(torch.as_tensor(batch.document_ends), len(tokens))
    return [MicroBatch(*parts) for parts in zip(tokens, labels, cuts, strict=True)]


def _cu_seqlens(document_ends: Tensor, rows: int) -> list[Tensor] | list[None]:
    if not len(document_ends):
        return [None] * rows
    row_tokens = int(document_ends[-1]) // rows
    offsets = torch.cat([document_ends.new_zeros(1), document_ends])
    edges = torch.searchsorted(offsets, torch.arange(rows + 1) * row_tokens).tolist()
    return [(offsets[start : end + 1] - offsets[start]).int() for start, end in pairwise(edges)]


def _iterator_of(loader: DataLoader) -> Any:
    """Start the workers deaf to Ctrl-C and to SIGTERM, which go to all processes of a rank.

    What they mean is for the rank to decide; a worker that died of them would break it on its way out.
    """
    ours = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_IN_WORKERS)  # a forked process keeps it
    try:
        with _undisturbed():
            return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, ours)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Hold a first Ctrl-C and a first SIGTERM back until this is left, if they would be handled in Python.

    An exception that strikes within a queue's lock leaves it locked, and the process would never end.
    """
    held: list[signal.Signals] = []
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    ours = {signum: handler for signum, handler in handlers.items() if callable(handler)}

    def hold(signum: int, frame: FrameType | None) -> None:
        if signum in held:
            ours[signal.Signals(signum)](signum, frame)
        held.append(signal.Signals(signum))

    for signum in ours:
        signal.signal(signum, hold)
    try:
        yield
    finally:
        for signum, handler in ours.items():
            signal.signal(signum, handler)
        for signum in held:
            ours[signum](signum, None)


def _belong_to_the_parent(worker: int) -> None:
    """End when the parent ends, whatever ends it, and when it says so.

    A worker that outlived its rank would hold the rank's connections open, and the others would wait for it.
    """
    sys.excepthook = _report_unless_cut_off
    if ON_LINUX:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        threading.Thread(target=_leave_when_the_parent_says_so, daemon=True).start()


def _leave_when_the_parent_says_so() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


def _report_unless_cut_off(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A thread of multiprocessing hands batches over; Ctrl-C in the midst of that is no news."""
    if not issubclass(kind, EOFError | ConnectionError):
        sys.__excepthook__(kind, error, trace)
