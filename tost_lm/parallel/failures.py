"""A rank that fails, dies, hangs or falls silent ends the run on every rank, with one line that names it."""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from tost_lm.config.program import EXIT_LEFT
from tost_lm.errors import TostError
from tost_lm.parallel.heartbeat import Heartbeat
from tost_lm.parallel.patient_store import ANSWER_S, SilentStoreError
from tost_lm.parallel.roll_call import RollCall

POLL_S = 0.25  # between two looks at the other ranks
LET_READ_S = 0.3  # how long the line stays: the store may go with this process
STUCK_S = 10.0  # what a rank may take to end by itself; longer than run_program holds an error back
HUNG_S = 0.1  # the same for one that has made no progress for its whole time
BUILDING_S = 600.0  # at least what a rank may take until its first step: imports, compilers, file systems
SUSPENDED_S = ANSWER_S + 0.5  # looks so far apart say that this process was stopped meanwhile
GLOO_SAYS = ("gloo/transport/", "Application timeout caused pair closure")  # NCCL and the store raise DistError


class LostRankError(TostError):
    """What became of the ranks that broke the run: one line, the same on every rank that is left.

    `printed_here` is true on the one rank that is to print it.
    """

    def __init__(self, line: str, printed_here: bool) -> None:
        super().__init__(line)
        self.printed_here = printed_here


@contextmanager
def naming_lost_ranks(
    heart: Heartbeat | None = None, timeout_s: float | None = None, on_terminate: Callable[[], None] | None = None
) -> Iterator[None]:
    """To be put around all that the ranks do together, in the main thread of each, until they have parted.

    An error of this rank's own is told to the others and goes on unchanged. A rank that hangs in a collective, as with
    NCCL when a peer is gone, prints the line and exits with 2 about 10 s after the others know.

    Args:
        heart: of this rank's main thread; the line says where lost ranks stood.
        timeout_s: [s] when a rank's heart has not beaten for so long (while it is building, 10 minutes at least), the
            rank that hangs is named, and every rank ends within 2 s more: with the line, or at once with exit code 2,
            for its main thread may wait for good. Time in which this process was stopped does not count.
        on_terminate: called on SIGTERM while all is well, in place of the program's handler.

    Raises:
        LostRankError: communication broke, or the launcher sent SIGTERM because of another rank. SIGTERM is ignored
            from then on, so that the line gets out.
        SystemExit: SIGTERM came while all was well, without `on_terminate` and a handler of the program's.
    """
    watch = _Watch(heart, timeout_s) if dist.get_world_size() > 1 else None
    with _receiving_sigterm(watch, on_terminate):
        if watch is None:
            yield
            return
        try:
            yield
            watch.leave("had finished")
        except LostRankError:
            raise
        except BaseException as error:
            if _is_broken_communication(error):
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                raise watch.finding(_first_line(error)) from None
            if isinstance(error, SystemExit) and error.code == EXIT_LEFT:
                watch.leave("left early")  # as the others will: no trouble
            else:
                watch.leave_with(error)
            raise
        finally:
            watch.close()


@contextmanager
def _receiving_sigterm(watch: "_Watch | None", on_terminate: Callable[[], None] | None) -> Iterator[None]:
    before, pid = signal.getsignal(signal.SIGTERM), os.getpid()

    def terminate(*_: object) -> None:
        here = os.getpid() == pid  # a forked worker has this handler, too
        if here and watch and watch.leaving:
            return
        with suppress(dist.DistError):
            if here and watch and watch.roll.sees_trouble():
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                raise watch.finding("SIGTERM")
        if not here or on_terminate is None:
            sys.exit(128 + signal.SIGTERM)
        on_terminate()

    # torchrun sends SIGTERM 0.1 s after a death, when a rank that waits for a live one has not noticed yet.
    if on_terminate or (watch and before is signal.SIG_DFL):
        signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is terminate:
            signal.signal(signal.SIGTERM, before)


class _Watch:
    """A thread that answers for this rank, whatever its main thread waits for, and finds out which ranks are lost."""

    def __init__(self, heart: Heartbeat | None, timeout_s: float | None) -> None:
        self.roll = RollCall(heart)
        self.heart, self.timeout_s = heart, timeout_s
        self.seen_beat, self.suspended_s, self.looked_at = 0.0, 0.0, time.monotonic()
        self.body_is_over, self.leaving, self.cause = threading.Event(), False, ""
        self.found: LostRankError | None = None
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def leave(self, how: str) -> None:
        self.leaving = True
        self.body_is_over.set()
        self.thread.join()
        with suppress(dist.DistError):  # the store went with a rank that left before
            self.roll.say(how)

    def leave_with(self, error: BaseException) -> None:
        how = f"{'failed' if isinstance(error, Exception) else 'left'}: {_first_line(error)}"
        self.leave(how)
        if isinstance(error, TostError) and error.printed_here is False and self.found and self.found.printed_here:
            error.printed_here = True  # the others hold that this rank prints a line
        with suppress(dist.DistError):
            self.roll.say_first(how, prints_it=isinstance(error, TostError) and error.printed_here is not False)
            time.sleep(2 * POLL_S)  # the store may go with this process: let the others read first

    def finding(self, cause: str) -> LostRankError:
        self.cause = cause
        self.body_is_over.set()
        self.thread.join()
        assert self.found
        return self.found

    def close(self) -> None:
        self.body_is_over.set()
        self.thread.join()
        self.roll.store.close()

    def _watch(self) -> None:
        while self._sleeps():
            try:
                if self._seconds_left() <= 0 or self.roll.sees_trouble():
                    break
            except SilentStoreError:
                continue  # it may come back, and the ranks can go on without it
            except dist.DistError:
                if not self.roll.launcher_holds_store:
                    break  # rank 0 went
        if self.leaving:
            return
        self.found = self._find_out()
        if not self.body_is_over.wait(HUNG_S if self.hung else STUCK_S):
            if self.found.printed_here:
                print(f"error: {self.found}", file=sys.stderr, flush=True)
            os._exit(2)

    def _find_out(self) -> LostRankError:
        self.hung = self._seconds_left() <= 0 or bool(
            self.heart and re.search("time(d )?out", self.cause, re.IGNORECASE)
        )
        try:
            line = self.roll.verdict(self.cause, self.hung, lambda: self.leaving)
            printed_here = not self.leaving and self.roll.is_the_one_to_print()
            self.hung = self.roll.finds_a_hang()
        except dist.DistError:
            line, printed_here = self.roll.without_store()
        time.sleep(LET_READ_S / 2 if self.hung else LET_READ_S)  # who found a hang looks more often
        return LostRankError(line, printed_here)

    def _sleeps(self) -> bool:
        """Until the next look is due; False: the body is over."""
        pause = max(0.0, min(POLL_S, self._seconds_left()))
        if self.body_is_over.wait(pause):
            return False
        self._notice_beat()
        gap, self.looked_at = time.monotonic() - self.looked_at, time.monotonic()
        self.suspended_s += gap if gap > SUSPENDED_S else 0
        return True

    def _notice_beat(self) -> None:
        if self.heart and self.heart.beaten_at != self.seen_beat:
            self.seen_beat, self.suspended_s = self.heart.beaten_at, 0.0

    def _seconds_left(self) -> float:
        """Until this rank's main thread counts as hung."""
        if self.heart is None or self.timeout_s is None:
            return float("inf")
        self._notice_beat()
        limit = max(self.timeout_s, BUILDING_S) if self.heart.last.phase == "building" else self.timeout_s
        return self.seen_beat + limit + self.suspended_s - time.monotonic()


def _is_broken_communication(error: BaseException | None) -> bool:
    """Whether this error, or one that it was raised from, is the process group's."""
    if not isinstance(error, Exception):
        return False
    if isinstance(error, dist.DistError) or any(text in str(error) for text in GLOO_SAYS):
        return True
    return _is_broken_communication(error.__cause__ or (None if error.__suppress_context__ else error.__context__))


def _first_line(error: BaseException) -> str:
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
