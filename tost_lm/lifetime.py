"""Processes that end with the process that started them."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends; exits with 1 if that has ended. Only on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # which ended before that
            os._exit(1)
