"""Graceful stop of an evaluation: on SIGTERM, all ranks end together between two model calls."""

import os
import signal
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

EXIT_TERMINATED = 128 + signal.SIGTERM
_FINISHED, _WORKING, _STOPPING = range(3)


class Terminated(BaseException):
    """SIGTERM was received. Not an `Exception`, so that no error handler catches it."""


def terminable(main: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """The `main` of a program; SIGTERM ends it with one line on stderr and exit code 143."""

    @wraps(main)
    def run(path: Any, config: Any) -> None:
        signal.signal(signal.SIGTERM, _raise)
        try:
            return main(path, config)
        except Terminated:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        except BaseException:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # of the launcher, when another rank has reported the error
            raise
        # After the exception is gone: its traceback holds process groups, whose threads must end before Python.
        if os.environ.get("RANK", "0") == "0":
            print("terminated by SIGTERM; run the same command again to resume", file=sys.stderr)
        sys.exit(EXIT_TERMINATED)

    return run


class StopRequest:
    """SIGTERM on any of several ranks. The ranks compare it between model calls, so that none waits for another."""

    def __init__(self) -> None:
        self._is_requested = False

    def request(self) -> None:
        self._is_requested = True

    def check(self) -> None:
        """All ranks call it before a model call, or are in `wait_for_copies`. Raises Terminated on all of them."""
        self._agree(_WORKING)

    def wait_for_copies(self) -> None:
        """Return once no rank calls `check` any more; all ranks call it. Raises Terminated as `check` does."""
        while self._agree(_FINISHED) != _FINISHED:
            pass

    def _agree(self, state: int) -> int:
        from tost_lm.parallel.mesh import max_over_ranks

        agreed = max_over_ranks(_STOPPING if self._is_requested else state)
        if agreed == _STOPPING:
            raise Terminated
        return agreed


def _raise(*_: object) -> NoReturn:
    raise Terminated
