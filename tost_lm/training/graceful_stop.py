"""Graceful stop: leave early with everything saved, on a signal or before a time limit."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil

from tost_lm.config import EXIT_STOPPED

REASONS = ("", "SIGTERM", "SIGUSR1", "SIGINT", "run.max_minutes")
SAME_INTERRUPT_S = 1.0
"""A launcher may repeat a Ctrl-C that its ranks have already received from the terminal."""


class StopRequestedError(Exception):
    """Raised on all ranks between two micro-batches, so that a step, a validation or an evaluation is abandoned."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class GracefulStop:
    """The requests to stop that this rank has received. The ranks compare them and stop together."""

    def __init__(self, max_minutes: float | None = None) -> None:
        self._deadline = None if max_minutes is None else _launched() + 60 * max_minutes
        self._reason, self._interrupted_at = "", 0.0
        self._training = False

    def install_handlers(self) -> None:
        """From now on SIGTERM, SIGUSR1 and a first Ctrl-C request a stop. Before training they end this process."""
        for signum in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(signum, lambda number, frame: self.request(signal.Signals(number).name))
        signal.signal(signal.SIGINT, self._interrupt)

    def request(self, reason: str = "SIGTERM") -> None:
        """Stop after this micro-batch, or at once while there is nothing to save."""
        if not self._training:
            exit_stopped()
        self._reason = self._reason or reason

    def start_training(self, compare: Callable[[], str]) -> str:
        """From now on the training loop asks for requests. Returns `compare()`, the first comparison of all ranks.

        A rank that received its request just before this call has ended, so the comparison fails. If this rank has a
        request too, it also ends: there is nothing to save.
        """
        self._training = True
        try:
            return compare()
        except Exception:
            if self._reason:
                exit_stopped()
            raise

    def requested(self, seconds_needed: float) -> str:
        """Why this rank has to stop, one of REASONS; empty: it continues.

        Args:
            seconds_needed: time [s] that it takes to finish and save before `run.max_minutes`.
        """
        late = self._deadline is not None and time.time() + seconds_needed >= self._deadline
        return self._reason or ("run.max_minutes" if late else "")

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        if not self._training or (self._interrupted_at and time.monotonic() > self._interrupted_at + SAME_INTERRUPT_S):
            raise KeyboardInterrupt
        if not self._interrupted_at:
            self._interrupted_at = time.monotonic()
            if os.environ.get("RANK", "0") == "0":
                print("\nsaving a checkpoint before the run stops; press Ctrl-C again to stop at once", flush=True)
            self.request("SIGINT")


def exit_stopped() -> NoReturn:
    """End this process with the exit code of a graceful stop."""
    if "STOPPED_FILE" in os.environ:  # configs/cluster/launch.sh reads it
        Path(os.environ["STOPPED_FILE"]).touch()
    sys.exit(EXIT_STOPPED)


def _launched() -> float:
    """Start of the launch in Unix time [s]: a launcher, if there is one, may have started other processes before."""
    has_launcher = "TORCHELASTIC_RUN_ID" in os.environ
    return psutil.Process(os.getppid() if has_launcher else os.getpid()).create_time()
