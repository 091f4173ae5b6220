"""From the arrays of the loader to the micro-batches of a rank, read ahead by worker processes, which may die."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tost_lm.data.loader import Batch, TrainingBatches
from tost_lm.errors import DataError
from tost_lm.lifetime import end_with_parent
from tost_lm.torch_internals import end_loader_workers, handle_failed_sends, loader_workers, pinning_has_ended


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
PINNING_ENDED = "Pin memory thread exited unexpectedly"  # torch's message
TIMED_OUT = "DataLoader timed out"  # the same
WAIT_S = 0.25  # for a batch, until signals are handled
PREFETCHED = 2  # batches that torch lets each worker read ahead
ON_LINUX = sys.platform == "linux"  # elsewhere the sender of a signal is unknown, and torch ends orphans after 5 s
BLOCKED_IN_WORKERS = {signal.SIGINT, signal.SIGTERM} if ON_LINUX else {signal.SIGINT}


def shared_memory_bytes(tokens: int, workers: int) -> int:
    """The bytes of /dev/shm for a rank's batches of so many tokens: those read ahead, and the one in use."""
    return 2 * np.dtype(np.int32).itemsize * tokens * (PREFETCHED * workers + 1) if workers else 0


@contextmanager
def prefetched(
    batches: TrainingBatches,
    steps: range,
    workers: int,
    device: torch.device,
    while_waiting: Callable[[], None] = lambda: None,
) -> Iterator[Iterator[tuple[int, list[MicroBatch]]]]:
    """Each step with its micro-batches, prefetched by `workers` processes (0: read in this process).

    Use it in the main thread, around the training that consumes the batches. The workers have ended on exit.

    Args:
        while_waiting: called every WAIT_S in which a worker has no batch; it may raise.

    Raises:
        DataError: a shard is damaged; a worker died, at whatever point of the training, or could not send a batch; or
            the thread died that copies batches to pinned memory.
    """
    reason, write_reason = os.pipe()
    os.set_blocking(reason, False)
    loader = DataLoader(
        _Reader(batches),  # pyright: ignore[reportArgumentType]
        batch_size=None,
        sampler=steps,
        num_workers=workers,
        # Safe although CUDA and InfiniBand have started: workers read files into host memory, torch refuses CUDA in
        # them, and start_world makes the memory of InfiniBand and EFA survive a fork.
        multiprocessing_context="fork" if workers else None,
        worker_init_fn=partial(_exit_with_parent, os.getpid(), write_reason),
        timeout=WAIT_S if workers else 0,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # otherwise it draws from the default generator, which training uses
    )
    try:
        iterator = _start_iterator(loader)
        try:
            yield _each_step(steps, iterator, device, while_waiting)
        finally:
            if workers:
                with _signals_deferred():
                    end_loader_workers(iterator)
    except RuntimeError as error:
        if not any(message in str(error) for message in (WORKER_DIED, PINNING_ENDED)):
            raise
        batches.check_sizes()  # a worker that reads a map after the end of its file is ended by SIGBUS
        line = str(error).strip().splitlines()[0].strip(" .")
        lost = DataError(
            f"data.workers: {line}, on {socket.gethostname()}{_read(reason)}; run the same command to resume from the "
            "newest checkpoint, with data.workers=0 to use no workers"
        )
        lost.printed_here = True  # no other rank reports this worker
        raise lost from None
    finally:
        os.close(reason)
        os.close(write_reason)


def _each_step(
    steps: range, iterator: Any, device: torch.device, while_waiting: Callable[[], None]
) -> Iterator[tuple[int, list[MicroBatch]]]:
    for step in steps:
        while (batch := _next(iterator)) is None:
            while_waiting()
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


def _next(iterator: Any) -> Batch | DataError | None:
    """The next batch; None: there is none after WAIT_S."""
    with _signals_deferred():
        try:
            return next(iterator)
        except (ConnectionError, EOFError, FileNotFoundError):  # a worker died while it sent a batch
            _raise_for_dead_worker(iterator)
            raise
        except RuntimeError as error:
            if TIMED_OUT not in str(error):
                raise
            if pinning_has_ended(iterator):
                _raise_for_dead_worker(iterator)  # whose batch ended the thread
                raise RuntimeError(PINNING_ENDED) from None
            return None


def _raise_for_dead_worker(iterator: Any) -> None:
    for worker in loader_workers(iterator):
        worker.join(1.0)
        if not worker.is_alive():
            raise RuntimeError(f"{WORKER_DIED} {worker.pid}) exited unexpectedly") from None


def _read(reason: int) -> str:
    try:
        return f": {os.read(reason, 4096).decode(errors='replace')}"
    except BlockingIOError:
        return ""  # the worker was killed


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
    """Defer the first exception of a Python handler of SIGINT or SIGTERM to the exit of this context.

    Inside a queue's lock it would leave it locked, and the process might never end. It is not deferred after 2·WAIT_S:
    a worker that has stopped while it sends a batch may block this process without a limit.
    """
    deferred: list[BaseException] = []
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    ours = {signum: handler for signum, handler in handlers.items() if callable(handler)}
    began = time.monotonic()

    def defer(signum: int, frame: FrameType | None) -> None:
        try:
            ours[signal.Signals(signum)](signum, frame)
        except BaseException as error:
            if deferred or time.monotonic() > began + 2 * WAIT_S:
                raise
            deferred.append(error)

    for signum in ours:
        signal.signal(signum, defer)
    try:
        yield
    finally:
        for signum, handler in ours.items():
            signal.signal(signum, handler)
        if deferred:
            raise deferred[0]


def _exit_with_parent(parent: int, write_reason: int, worker: int) -> None:
    """Make this worker exit when its rank `parent` exits, on SIGTERM from it, and if it cannot send a batch.

    A worker that outlives its rank keeps the rank's connections open, and the other ranks wait.
    """
    sys.excepthook = _report_unless_disconnected
    signal.signal(signal.SIGBUS, signal.SIG_DFL)  # torch's handler prints that shared memory is too small
    handle_failed_sends(partial(_exit_with_reason, write_reason))
    end_with_parent(parent)
    if ON_LINUX:
        threading.Thread(target=_exit_on_sigterm_of_parent, daemon=True).start()


def _exit_with_reason(write_reason: int, error: Exception, batch: object) -> None:
    text = str(error).partition("\n")[0]
    if "shared memory" in text:
        text += " (enlarge /dev/shm; in a container with --shm-size)"
    os.write(write_reason, text.encode())
    os._exit(1)


def _exit_on_sigterm_of_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


def _report_unless_disconnected(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Hide the error of the thread that transfers a batch when Ctrl-C closes the connection."""
    if not issubclass(kind, EOFError | ConnectionError):
        sys.__excepthook__(kind, error, trace)
