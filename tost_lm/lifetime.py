"""Processes that end with the process that started them, or with their output, or do not notice Ctrl-C."""

import ctypes
import errno
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

PR_SET_PDEATHSIG = 1
EXIT_BROKEN_PIPE = 128 + signal.SIGPIPE


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends; exits with 1 if that has ended. Only on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # which ended before that
            os._exit(1)


@contextmanager
def end_with_output() -> Iterator[None]:
    """Exit when an output cannot be written: with one line if no space is left, and without a message if its reader,
    such as `head`, has ended."""
    try:
        try:
            yield
        finally:
            print(end="", flush=True)  # at exit, Python would print that it fails
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        if error.errno == errno.ENOSPC:
            print(f"error: an output cannot be written: {error.strerror}; make room for it", file=sys.stderr)
        for output in (1, 2):  # so that the flush at exit does not fail
            os.dup2(os.open(os.devnull, os.O_WRONLY), output)
        sys.exit(EXIT_BROKEN_PIPE if error.errno == errno.EPIPE else 2)


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Processes that are started within it do not notice Ctrl-C: they inherit the blocked signal."""
    ours = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, ours)
