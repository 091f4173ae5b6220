"""Work in worker processes that end with this one."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from tost_lm.errors import DataError

IN_FLIGHT = 3  # items per worker: keeps workers busy and bounds memory

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_processes(
    work: Callable[[Any, Item], Result],
    items: Iterable[Item],
    workers: int,
    make: Callable[..., Any],
    args: tuple[Any, ...],
    died: str,
) -> Generator[tuple[Item, Result], None, None]:
    """Each item with `work(state, item)` from one of `workers` processes, in order; reads a bounded number ahead.

    Each process makes its state once: `make(*args)`. Functions and arguments are pickled.

    Raises:
        DataError: a worker process died, or `make` failed; the message is `died`. Errors of `items` and `work` pass
            through.
    """
    context = multiprocessing.get_context("spawn")  # a forked worker would keep the open files of this process
    pool = ProcessPoolExecutor(workers, context, _start, (make, args))
    in_flight: deque[tuple[Item, Future[Result]]] = deque()
    try:
        for item in items:
            # Only this process handles Ctrl-C; workers that `submit` starts inherit the blocked signal.
            ours = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                in_flight.append((item, pool.submit(_work, work, item)))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, ours)
            if len(in_flight) > IN_FLIGHT * workers:
                item, result = in_flight.popleft()
                yield item, result.result()
        for item, result in in_flight:
            yield item, result.result()
    except BrokenProcessPool:
        raise DataError(died) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def available_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_state: Any = None
"""In a worker process: what `make` returned."""


def _start(make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    global _state
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()  # also if it is killed
    _state = make(*args)


def _work(work: Callable[[Any, Item], Result], item: Item) -> Result:
    return work(_state, item)
