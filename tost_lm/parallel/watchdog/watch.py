"""The watchdog thread: a rank that fails, dies, hangs or stops answering ends the run on every rank with one line."""

import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from tost_lm.config.program import EXIT_STOPPED
from tost_lm.errors import LostRankError, TostError
from tost_lm.parallel import timeouts
from tost_lm.parallel.timeouts import Timeouts
from tost_lm.parallel.watchdog.heartbeat import Heartbeat, HeartbeatRecord, read_heartbeats
from tost_lm.parallel.watchdog.store import StoreTimeoutError, TimeoutStore
from tost_lm.parallel.watchdog.verdict import ANSWERS, GONE, RUNS, RankState, verdict
from tost_lm.torch_internals import dump_flight_record, is_communication_error


@contextmanager
def watch_ranks(
    heartbeat: Heartbeat | None = None, limits: Timeouts | None = None, on_terminate: Callable[[], None] | None = None
) -> Iterator[None]:
    """Run the watchdog around all collective work, in the main thread of each rank.

    A process whose main thread does not end, as in NCCL after a peer died, prints the line and exits with 2.

    Args:
        heartbeat: of this rank's main thread. After its timeout the rank that hangs is named, and every rank ends
            within 2 s. Time in which this process was suspended does not count.
        on_terminate: replaces the program's SIGTERM handler while no rank is lost.

    Raises:
        LostRankError: another rank ended the run.
        SystemExit: on SIGTERM while no rank is lost, if neither `on_terminate` nor the program handles it.
    """
    watchdog = _Watchdog(heartbeat, limits or Timeouts()) if dist.get_world_size() > 1 else None
    before, pid = signal.getsignal(signal.SIGTERM), os.getpid()

    def terminate(*_: object) -> None:
        is_rank = os.getpid() == pid  # forked workers inherit this handler
        if is_rank and watchdog and watchdog.main_left.is_set():
            return
        # torchrun sends SIGTERM 0.1 s after a death, before a rank that waits for a live one has noticed it.
        if not is_rank or on_terminate is None or (watchdog and watchdog.is_needed()):
            sys.exit(128 + signal.SIGTERM)
        on_terminate()

    if on_terminate or (watchdog and before is signal.SIG_DFL):
        signal.signal(signal.SIGTERM, terminate)
    try:
        yield
        if watchdog:
            watchdog.finish("had finished")
    except BaseException as error:
        if watchdog:
            watchdog.fail(error)
        raise
    finally:
        if signal.getsignal(signal.SIGTERM) is terminate:
            signal.signal(signal.SIGTERM, before)


class _Watchdog:
    """A thread that watches this rank's heartbeat and node, and agrees with those of the other ranks on the line.

    Keys in the store: RANK: its RankState; asked: the first rank that asked for the line; line; printer: its rank.
    """

    def __init__(self, heartbeat: Heartbeat | None, limits: Timeouts) -> None:
        self.heartbeat, self.limits, self.store = heartbeat, limits, TimeoutStore("watchdog")
        rank, self.ranks = dist.get_rank(), range(dist.get_world_size())
        self.me, self.state = str(rank), RankState(HeartbeatRecord(rank, socket.gethostname(), os.getpid()))
        first = max(0, rank - int(os.environ.get("LOCAL_RANK", 0)))
        self.node = self.ranks[first : first + int(os.environ.get("LOCAL_WORLD_SIZE", len(self.ranks)))]
        self.neighbours: dict[int, RankState] = {}
        self.launcher_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self.heartbeat_at, self.waited_s, self.checked_at = 0.0, 0.0, time.monotonic()
        self.main_left, self.has_own_end, self.exit_s = threading.Event(), False, timeouts.EXIT_S
        self.error: LostRankError | None = None
        self.publish(self.state)
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def finish(self, how: str) -> None:
        """End the thread, and publish how this rank ended."""
        self.has_own_end = True
        self.main_left.set()
        self.thread.join()
        with suppress(dist.DistError):  # the store may have ended with another rank
            self.publish(self.state._replace(status=how))

    def fail(self, error: BaseException) -> None:
        """End the thread. Raise the line if this error comes from another rank; else publish it as the line."""
        inner = error if isinstance(error, LostRankError) else None  # of a use within this one, which chose the printer
        if inner or is_communication_error(error) or (isinstance(error, SystemExit) and self.is_needed()):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # so that the line is printed
            self.main_left.set()
            self.thread.join()
            lost = inner or self.error or self.agree(_first_line(error))
            dump_flight_record(timeouts.DUMP_S, timeouts.GIL_S)
            raise lost from None
        if isinstance(error, SystemExit) and error.code == EXIT_STOPPED:
            self.finish("had stopped gracefully")  # as the other ranks will
            return
        how = f"{'failed' if isinstance(error, Exception) else 'exited'}: {_first_line(error)}"
        self.finish(how)
        with suppress(dist.DistError):
            if isinstance(error, TostError) and error.printed_here is not False:
                self.store.set_if_new("printer", self.me)
            elif isinstance(error, TostError):
                error.printed_here = self.store.get("printer") == self.me  # if so, no other rank prints a line
            self.store.set_if_new("line", f"rank {self.me} {how}")
            self.store.set_if_new("asked", self.me)
            time.sleep(2 * timeouts.CHECK_S)  # the store may end with this process: let the others read first
            if self.me != "0" and isinstance(error, TostError) and error.printed_here is None:
                error.printed_here = False if self.read(0).status == how else None  # rank 0 prints the same error

    def is_needed(self) -> bool:
        """Whether a rank asked for the line, or a rank of this node died."""
        try:
            return bool(self.store.get("asked") or self.gone())
        except StoreTimeoutError:
            return False  # it may recover, and the ranks can continue without it
        except dist.DistError:
            return not self.launcher_has_store  # else rank 0 ended

    def watch(self) -> None:
        while self.seconds_left() > 0 and not self.is_needed():
            if self.main_left.wait(max(0.0, min(timeouts.CHECK_S, self.seconds_left()))):
                return
        self.error = self.agree("")
        if not self.main_left.wait(self.exit_s):
            if self.error.printed_here:
                print(f"error: {self.error}", file=sys.stderr, flush=True)
            dump_flight_record(timeouts.DUMP_S, timeouts.GIL_S)
            os._exit(2)

    def agree(self, cause: str) -> LostRankError:
        """Answer, ask for the line, and wait for it. `cause` is this rank's error."""
        try:
            error = LostRankError(self.poll(cause))
            printer = self.me if self.has_own_end else self.store.set_if_new("printer", self.me)
            if self.read(int(printer)).status != ANSWERS:
                self.exit_s = timeouts.FAILED_EXIT_S
        except dist.DistError:
            host = f"the launcher on {os.environ['MASTER_ADDR']}" if self.launcher_has_store else "rank 0"
            error = LostRankError(f"{host} was lost: it held the rendezvous store")
            printer = str(self.node[0] or int(not self.launcher_has_store))  # one of each node: nodes may be cut off
        error.printed_here = printer == self.me
        time.sleep(timeouts.READ_S)  # the store may end with this process: let the others read first
        return error

    def poll(self, cause: str) -> str:
        self.publish(RankState(self.heartbeat.last if self.heartbeat else self.state.last, ANSWERS))
        is_first = self.store.set_if_new("asked", self.me) == self.me
        checks = round(timeouts.ANSWER_S / timeouts.POLL_S) * (1 if is_first else 2)  # the first one may die, too
        while not (line := self.store.get("line")) and not self.has_own_end:
            for state in self.gone():
                self.publish(state._replace(status=GONE))
            checks -= 1  # not the time: if this rank is slow, so are others
            if checks < 0 or (is_first and all(self.read(rank).status != RUNS for rank in self.ranks)):
                files = read_heartbeats(self.heartbeat.folder) if self.heartbeat else {}
                return self.store.set_if_new("line", verdict([*map(self.read, self.ranks)], files, cause))
            time.sleep(timeouts.POLL_S)
        return line

    def seconds_left(self) -> float:
        """Until the heartbeat timeout."""
        gap, self.checked_at = time.monotonic() - self.checked_at, time.monotonic()
        if self.heartbeat is None:
            return math.inf
        if self.heartbeat.recorded_at != self.heartbeat_at:
            self.heartbeat_at, self.waited_s = self.heartbeat.recorded_at, 0.0
            gap = min(gap, time.monotonic() - self.heartbeat_at)
        self.waited_s += gap if gap < timeouts.SUSPENDED_S else 0.0
        return self.limits.of_phase(self.heartbeat.last.phase) - self.waited_s

    def gone(self) -> list[RankState]:
        """Ranks of this node whose process ended without publishing it."""
        for rank in set(self.node).difference(self.neighbours):
            if (state := self.read(rank)).last.host == self.state.last.host and Path("/proc").exists():
                self.neighbours[rank] = state
        gone = [rank for rank, state in self.neighbours.items() if not Path("/proc", str(state.last.pid)).exists()]
        return [state for rank in gone if (state := self.read(rank)).status in (RUNS, ANSWERS)]

    def read(self, rank: int) -> RankState:
        last, *status = json.loads(self.store.get(str(rank)) or f"[[{rank}]]")
        return RankState(HeartbeatRecord(*last), *status)

    def publish(self, state: RankState) -> None:
        self.store.set(str(state.last.rank), json.dumps(state))


def _first_line(error: BaseException) -> str:
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
