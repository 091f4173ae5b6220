"""Leaving early with everything saved: on SIGTERM, on SIGUSR1, and before a time limit."""

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil

from tost_lm.config.program import EXIT_LEFT

REASONS = ("", "SIGTERM", "SIGUSR1", "run.max_minutes")


class Departure:
    """What this rank knows of reasons to leave. All ranks leave together, after the same step."""

    def __init__(self, max_minutes: float | None = None) -> None:
        self._deadline = None if max_minutes is None else _launched() + 60 * max_minutes
        self._asked = ""
        self._under_way = False

    def listen(self) -> None:
        """From now on SIGTERM and SIGUSR1 ask to leave; while there is nothing to save, they end this process."""
        for signum in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(signum, self._hear)

    def ask(self, reason: str = "SIGTERM") -> None:
        """Leave after this step, or at once while there is nothing to save."""
        if not self._under_way:
            leave()
        self._asked = self._asked or reason

    def get_under_way(self) -> None:
        """From now on the loop asks `wish` after every step."""
        self._under_way = True

    def wish(self, seconds_needed: float) -> int:
        """Why this rank wants to leave, as an index of REASONS; 0: it does not.

        Args:
            seconds_needed: what one more step and saving take.
        """
        if self._asked:
            return REASONS.index(self._asked)
        late = self._deadline is not None and time.time() + seconds_needed >= self._deadline
        return REASONS.index("run.max_minutes") if late else 0

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        self.ask(signal.Signals(signum).name)


def leave() -> NoReturn:
    """End this process as one that left with everything saved."""
    if "LEFT_FILE" in os.environ:  # configs/cluster/launch.sh looks for it
        Path(os.environ["LEFT_FILE"]).touch()
    sys.exit(EXIT_LEFT)


def _launched() -> float:
    """When the launch began, in Unix time: torchrun, if it started this process, may have started others before."""
    torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    return psutil.Process(os.getppid() if torchrun else os.getpid()).create_time()
