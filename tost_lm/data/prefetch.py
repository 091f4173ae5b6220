"""From the arrays of the loader to the micro-batches of a rank, read ahead by worker processes, which may die."""

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
from tost_lm.torch_internals import end_loader_workers, loader_workers


class MicroBatch(NamedTuple):
    """The inputs of one model call, on the training device; `cu_seqlens` is on the host."""

    tokens: Tensor
    """int64 [B, T], or the sequence shard of this rank."""
    labels: Tensor
    """int64, as tokens."""
    cu_seqlens: Tensor | None = None
    """Offsets of the documents packed into one full row, int32 [documents + 1]; None: each row is a document."""


def micro_batches(batch: Batch, device: torch.device) -> list[MicroBatch]:
    """The micro-batches of a rank's `batch` (NumPy arrays, or tensors from a DataLoader), on `device`."""
    tokens, labels = (torch.as_tensor(x).to(device, non_blocking=True).long() for x in (batch.tokens, batch.labels))
    cuts = _cu_seqlens(torch.as_tensor(batch.document_ends), len(tokens))
    return [MicroBatch(*fields) for fields in zip(tokens, labels, cuts, strict=True)]


def _cu_seqlens(document_ends: Tensor, rows: int) -> list[Tensor] | list[None]:
    if not len(document_ends):
        return [None] * rows
    row_tokens = int(document_ends[-1]) // rows
    offsets = torch.cat([document_ends.new_zeros(1), document_ends])
    edges = torch.searchsorted(offsets, torch.arange(rows + 1) * row_tokens).tolist()
    return [(offsets[start : end + 1] - offsets[start]).int() for start, end in pairwise(edges)]


WORKER_DIED = "DataLoader worker (pid"  # how torch's message begins
PR_SET_PDEATHSIG = 1
ON_LINUX = sys.platform == "linux"  # elsewhere the sender of a signal is unknown, and torch ends orphans after 5 s
BLOCKED_IN_WORKERS = {signal.SIGINT, signal.SIGTERM} if ON_LINUX else {signal.SIGINT}


@contextmanager
def prefetched(
    batches: TrainingBatches, steps: range, workers: int, device: torch.device
) -> Iterator[Iterator[tuple[int, list[MicroBatch]]]]:
    """Each step with its micro-batches, prefetched by `workers` processes (0: read in this process).

    Use it in the main thread, around the training that consumes the batches. The workers have ended on exit.

    Raises:
        DataError: a shard is damaged, or a worker died, at whatever point of the training.
    """
    loader = DataLoader(
        _Reader(batches),  # pyright: ignore[reportArgumentType]
        batch_size=None,
        sampler=steps,
        num_workers=workers,
        # Safe although CUDA and InfiniBand have started: workers read files into host memory, torch refuses CUDA in
        # them, and start_world makes InfiniBand's memory survive a fork.
        multiprocessing_context="fork" if workers else None,
        worker_init_fn=_exit_with_parent,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # otherwise it draws from the default generator, which training uses
    )
    try:
        iterator = _start_iterator(loader)
        try:
            yield _each_step(steps, iterator, device)
        finally:
            if workers:
                with _signals_deferred():
                    end_loader_workers(iterator)
    except RuntimeError as error:
        if WORKER_DIED not in str(error):
            raise
        batches.check_sizes()  # a worker that reads a map after the end of its file is ended by SIGBUS
        line = str(error).strip().splitlines()[0].strip(" .")
        lost = DataError(
            f"data.workers: {line}, on {socket.gethostname()}; run the same command to resume from the newest "
            "checkpoint, with data.workers=0 to use no workers"
        )
        lost.printed_here = True  # no other rank reports this worker
        raise lost from None


def _each_step(steps: range, iterator: Any, device: torch.device) -> Iterator[tuple[int, list[MicroBatch]]]:
    for step in steps:
        with _signals_deferred():
            try:
                batch = next(iterator)
            except (ConnectionError, EOFError, FileNotFoundError):  # a worker died while it sent a batch
                for worker in loader_workers(iterator):
                    worker.join(1.0)
                    if not worker.is_alive():
                        raise RuntimeError(f"{WORKER_DIED} {worker.pid}) exited unexpectedly") from None
                raise
        if isinstance(batch, DataError):
            raise batch
        yield step, micro_batches(batch, device)


class _Reader:
    """The batches, or the DataError in place of one: torch would add a worker's traceback to its line."""

    def __init__(self, batches: TrainingBatches) -> None:
        self._batches = batches

    def __getitem__(self, step: int) -> Batch | DataError:
        try:
            return self._batches[step]
        except DataError as error:
            return error


def _start_iterator(loader: DataLoader) -> Any:
    """Start the workers with SIGINT and SIGTERM blocked, because these go to all processes of a rank.

    The rank handles them; a worker that they kill would break a graceful stop.
    """
    ours = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_IN_WORKERS)  # forked processes inherit it
    try:
        with _signals_deferred():
            return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, ours)


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Defer the first SIGINT and the first SIGTERM to the exit of this context, if they have Python handlers.

    An exception inside a queue's lock would leave it locked, and the process would never end.
    """
    deferred: list[signal.Signals] = []
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    ours = {signum: handler for signum, handler in handlers.items() if callable(handler)}

    def defer(signum: int, frame: FrameType | None) -> None:
        if signum in deferred:
            ours[signal.Signals(signum)](signum, frame)
        deferred.append(signal.Signals(signum))

    for signum in ours:
        signal.signal(signum, defer)
    try:
        yield
    finally:
        for signum, handler in ours.items():
            signal.signal(signum, handler)
        for signum in deferred:
            ours[signum](signum, None)


def _exit_with_parent(worker: int) -> None:
    """Make this worker exit when its rank exits for any reason, and on SIGTERM from its rank.

    A worker that outlives its rank keeps the rank's connections open, and the other ranks wait.
    """
    sys.excepthook = _report_unless_disconnected
    if ON_LINUX:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        threading.Thread(target=_exit_on_sigterm_of_parent, daemon=True).start()


def _exit_on_sigterm_of_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


def _report_unless_disconnected(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Hide the error of the thread that transfers a batch when Ctrl-C closes the connection."""
    if not issubclass(kind, EOFError | ConnectionError):
        sys.__excepthook__(kind, error, trace)
