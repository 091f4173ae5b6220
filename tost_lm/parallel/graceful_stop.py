"""Graceful stop: a training run leaves early with everything saved, on a signal or before a time limit."""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType

from tost_lm.command_line import EXIT_STOPPED

REASONS = ("", "SIGTERM", "SIGUSR1", "SIGINT", "run.max_minutes")
SAME_INTERRUPT_S = 1.0
"""A launcher may repeat a Ctrl-C that its ranks have already received from the terminal."""


class StopRequestedError(BaseException):
    """Raised on all ranks between two micro-batches, so that a step, a validation or an evaluation is abandoned. Not an
    `Exception`, so that no error handler catches it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class GracefulStop:
    """The requests to stop that this rank has received. The ranks compare them and stop together."""

    def __init__(self, max_minutes: float | None = None) -> None:
        self._deadline = None if max_minutes is None else time.monotonic() - launched_ago() + 60 * max_minutes
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
            sys.exit(EXIT_STOPPED)
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
                sys.exit(EXIT_STOPPED)
            raise

    def requested(self, seconds_needed: float) -> str:
        """Why this rank has to stop, one of REASONS; empty: it continues.

        Args:
            seconds_needed: time [s] that it takes to finish and save before `run.max_minutes`.
        """
        late = self._deadline is not None and time.monotonic() + seconds_needed >= self._deadline
        return self._reason or ("run.max_minutes" if late else "")

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        if not self._training or (self._interrupted_at and time.monotonic() > self._interrupted_at + SAME_INTERRUPT_S):
            raise KeyboardInterrupt
        if not self._interrupted_at:
            self._interrupted_at = time.monotonic()
            if os.environ.get("RANK", "0") == "0":
                with suppress(OSError):  # past sys.stdout, which may be in a write that this handler interrupts
                    os.write(1, b"\nsaving a checkpoint before the run stops; press Ctrl-C again to stop at once\n")
            self.request("SIGINT")


class StopOfRanks:
    """Stops the ranks of a training run together when one of them has a reason: after a step, or between two
    micro-batches."""

    def __init__(self, graceful_stop: GracefulStop, ranks: int, save_seconds: Callable[[], float]) -> None:
        """`save_seconds`: duration [s] of a save."""
        self._graceful_stop, self._ranks, self._save_seconds = graceful_stop, ranks, save_seconds
        self._since, self._longest_step = time.monotonic(), 0.0

    def votes_of_step(self) -> list[float]:
        """This rank's vote after a step, a number for each of REASONS; `reason_of` reads the sums over all ranks."""
        here = self._vote_of_step()
        return [float(number == here) for number in range(len(REASONS))]

    @staticmethod
    def reason_of(votes: Sequence[float]) -> str:
        """The reason of any rank; empty: continue."""
        return REASONS[max(number for number, count in enumerate(votes) if count)]

    def after_step(self) -> str:
        """The reason of any rank after a step in which nothing was reduced."""
        return self._compare(self._vote_of_step())()

    def begin_check(self) -> Callable[[], None]:
        """Start to compare the ranks, all of which call it between two micro-batches.

        Returns:
            A function that waits for the result. It raises StopRequestedError.
        """
        compared = self._compare(self._vote())

        def end() -> None:
            if reason := compared():
                raise StopRequestedError(reason)

        return end

    def check(self) -> None:
        """Compare the ranks, all of which call it. Raises StopRequestedError."""
        self.begin_check()()

    def while_waiting(self) -> None:
        """Called by a rank that waits for data. Raises StopRequestedError, but not on several ranks: they wait for this
        one, until it has data or the watchdog ends them."""
        if self._ranks == 1:
            self.check()

    def reason(self) -> str:
        """The reason of any rank, the same on all of them; empty: continue."""
        return self._compare(self._vote())()

    def _vote_of_step(self) -> int:
        """One reason may be that the time left is too short for another step."""
        now = time.monotonic()
        self._longest_step, self._since = max(self._longest_step, now - self._since), now
        return self._vote(self._longest_step)

    def _vote(self, seconds_needed: float = 0.0) -> int:
        """The number of this rank's reason.

        Args:
            seconds_needed: time [s] until the next vote. The save that is in progress and the last save come on top.
        """
        return REASONS.index(self._graceful_stop.requested(seconds_needed + 2 * self._save_seconds()))

    def _compare(self, vote: int) -> Callable[[], str]:
        from tost_lm.parallel.mesh import max_over_ranks

        read = max_over_ranks(vote) if self._ranks > 1 else lambda: vote
        return lambda: REASONS[read()]


def launched_ago() -> float:
    """Time [s] since the start of the launch: a launcher, if there is one, may have started other processes before."""
    import psutil  # of the extra `train`

    has_launcher = "TORCHELASTIC_RUN_ID" in os.environ
    # Both follow the wall clock, so their difference does not.
    return time.time() - psutil.Process(os.getppid() if has_launcher else os.getpid()).create_time()
