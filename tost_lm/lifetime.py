"""Processes that end with the process that started them, or do not notice Ctrl-C."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends; exits with 1 if that has ended. Only on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # which ended before that
            os._exit(1)


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Processes that are started within it do not notice Ctrl-C: they inherit the blocked signal."""
    ours = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, ours)
