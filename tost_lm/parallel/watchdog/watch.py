"""The watchdog thread: a rank that fails, dies, hangs or stops answering ends the run on every rank with one line."""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from tost_lm.config.program import EXIT_STOPPED
from tost_lm.errors import TostError
from tost_lm.parallel.watchdog.flight_recorder import dump_flight_record
from tost_lm.parallel.watchdog.heartbeat import Heartbeat
from tost_lm.parallel.watchdog.poll import RankPoll
from tost_lm.parallel.watchdog.store import RESPONSE_S, StoreTimeoutError

CHECK_EVERY_S = 0.25
READ_S = 0.3  # for other ranks to read the result, since the store may end with this process
EXIT_S = 10.0  # for the main thread to end by itself; longer than run_program delays an error
HUNG_EXIT_S = 0.1  # the same if the main thread hung for the whole timeout
BUILDING_S = 600.0  # minimal timeout before the first step: imports, compilers, file systems
SUSPENDED_S = RESPONSE_S + 0.5  # a longer gap between two checks means that this process was suspended
GLOO_ERRORS = ("gloo/transport/", "Application timeout caused pair closure")  # NCCL and the store raise DistError


class LostRankError(TostError):
    """One line, equal on all remaining ranks, about the ranks that ended the run.

    `printed_here` is true on the one rank that prints it.
    """

    def __init__(self, line: str, printed_here: bool) -> None:
        super().__init__(line)
        self.printed_here = printed_here


@contextmanager
def watch_ranks(
    heartbeat: Heartbeat | None = None, timeout_s: float | None = None, on_terminate: Callable[[], None] | None = None
) -> Iterator[None]:
    """Run the watchdog around all collective work, in the main thread of each rank.

    An error of this rank is reported to the others and raised unchanged. A rank that hangs in a collective, as with
    NCCL after a peer died, prints the line and exits with 2 about 10 s after the other ranks. Every rank that ends
    because of others dumps its flight record, if `enable_flight_recorder` was called.

    Args:
        heartbeat: of this rank's main thread; the line then has the last step of lost ranks.
        timeout_s: heartbeat timeout [s], at least 10 minutes in the phase "building". After it the watchdog names the
            rank that hangs. Every rank ends within 2 s, with the line or directly with exit code 2, since its main
            thread may wait forever. Time in which this process was suspended does not count.
        on_terminate: replaces the program's SIGTERM handler while no rank is lost.

    Raises:
        LostRankError: communication failed, or the launcher sent SIGTERM because of another rank. Further SIGTERMs are
            ignored, so that the line is printed.
        SystemExit: on SIGTERM while no rank is lost, if neither `on_terminate` nor the program handles it.
    """
    watchdog = _Watchdog(heartbeat, timeout_s) if dist.get_world_size() > 1 else None
    with _handling_sigterm(watchdog, on_terminate):
        if watchdog is None:
            yield
            return
        try:
            yield
            watchdog.finish("had finished")
        except LostRankError:
            raise
        except BaseException as error:
            if _is_communication_error(error):
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                raise watchdog.lost_rank_error(_first_line(error)) from None
            if isinstance(error, SystemExit) and error.code == EXIT_STOPPED:
                watchdog.finish("had stopped gracefully")  # as the other ranks will
            else:
                watchdog.fail(error)
            raise
        finally:
            watchdog.close()


@contextmanager
def _handling_sigterm(watchdog: "_Watchdog | None", on_terminate: Callable[[], None] | None) -> Iterator[None]:
    before, pid = signal.getsignal(signal.SIGTERM), os.getpid()

    def terminate(*_: object) -> None:
        is_rank = os.getpid() == pid  # forked workers inherit this handler
        if is_rank and watchdog and watchdog.is_ending:
            return
        with suppress(dist.DistError):
            if is_rank and watchdog and watchdog.poll.is_needed():
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                raise watchdog.lost_rank_error("SIGTERM")
        if not is_rank or on_terminate is None:
            sys.exit(128 + signal.SIGTERM)
        on_terminate()

    # torchrun sends SIGTERM 0.1 s after a death, before a rank that waits for a live one has noticed it.
    if on_terminate or (watchdog and before is signal.SIG_DFL):
        signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is terminate:
            signal.signal(signal.SIGTERM, before)


class _Watchdog:
    """A thread that answers polls while the main thread waits, and polls the ranks itself when one is lost."""

    def __init__(self, heartbeat: Heartbeat | None, timeout_s: float | None) -> None:
        self.poll = RankPoll(heartbeat)
        self.heartbeat, self.timeout_s = heartbeat, timeout_s
        self.heartbeat_at, self.suspended_s, self.checked_at = 0.0, 0.0, time.monotonic()
        self.main_ended, self.is_ending, self.cause = threading.Event(), False, ""
        self.error: LostRankError | None = None
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def finish(self, how: str) -> None:
        """End the thread, and publish how this rank ended."""
        self.is_ending = True
        self._stop()
        with suppress(dist.DistError):  # the store may have ended with another rank
            self.poll.report_end(how)

    def fail(self, error: BaseException) -> None:
        """End the thread, and report this rank's error to the others."""
        how = f"{'failed' if isinstance(error, Exception) else 'exited'}: {_first_line(error)}"
        self.finish(how)
        if isinstance(error, TostError) and error.printed_here is False and self.error and self.error.printed_here:
            error.printed_here = True  # the other ranks rely on this rank to print a line
        with suppress(dist.DistError):
            self.poll.report_failure(how, prints_it=isinstance(error, TostError) and error.printed_here is not False)
            time.sleep(2 * CHECK_EVERY_S)  # the store may end with this process: let the others read first

    def lost_rank_error(self, cause: str) -> LostRankError:
        """End the thread after a poll of the ranks."""
        self.cause = cause
        self._stop()
        assert self.error
        dump_flight_record()
        return self.error

    def close(self) -> None:
        self._stop()
        self.poll.store.close()

    def _stop(self) -> None:
        self.main_ended.set()
        self.thread.join()

    def _watch(self) -> None:
        while self._wait():
            try:
                if self._seconds_left() <= 0 or self.poll.is_needed():
                    break
            except StoreTimeoutError:
                continue  # it may recover, and the ranks can continue without it
            except dist.DistError:
                if not self.poll.launcher_has_store:
                    break  # rank 0 ended
        if self.is_ending:
            return
        self.error = self._poll_ranks()
        if not self.main_ended.wait(HUNG_EXIT_S if self.hung else EXIT_S):
            if self.error.printed_here:
                print(f"error: {self.error}", file=sys.stderr, flush=True)
            dump_flight_record()
            os._exit(2)

    def _poll_ranks(self) -> LostRankError:
        is_timeout = re.search("time(d )?out", self.cause, re.IGNORECASE)
        self.hung = self._seconds_left() <= 0 or bool(self.heartbeat and is_timeout)
        try:
            line = self.poll.run(self.cause, self.hung, lambda: self.is_ending)
            printed_here = not self.is_ending and self.poll.claim_printing()
            self.hung = self.poll.is_hang()
        except dist.DistError:
            line, printed_here = self.poll.store_lost()
        time.sleep(READ_S / 2 if self.hung else READ_S)  # ranks check more often after a hang
        return LostRankError(line, printed_here)

    def _wait(self) -> bool:
        """Wait until the next check; False: the main thread ended."""
        pause = max(0.0, min(CHECK_EVERY_S, self._seconds_left()))
        if self.main_ended.wait(pause):
            return False
        self._read_heartbeat()
        gap, self.checked_at = time.monotonic() - self.checked_at, time.monotonic()
        self.suspended_s += gap if gap > SUSPENDED_S else 0
        return True

    def _read_heartbeat(self) -> None:
        if self.heartbeat and self.heartbeat.recorded_at != self.heartbeat_at:
            self.heartbeat_at, self.suspended_s = self.heartbeat.recorded_at, 0.0

    def _seconds_left(self) -> float:
        """Until the heartbeat timeout."""
        if self.heartbeat is None or self.timeout_s is None:
            return float("inf")
        self._read_heartbeat()
        limit = max(self.timeout_s, BUILDING_S) if self.heartbeat.last.phase == "building" else self.timeout_s
        return self.heartbeat_at + limit + self.suspended_s - time.monotonic()


def _is_communication_error(error: BaseException | None) -> bool:
    """Whether this error, or one in its chain, comes from the process group."""
    if not isinstance(error, Exception):
        return False
    if isinstance(error, dist.DistError) or any(text in str(error) for text in GLOO_ERRORS):
        return True
    return _is_communication_error(error.__cause__ or (None if error.__suppress_context__ else error.__context__))


def _first_line(error: BaseException) -> str:
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
