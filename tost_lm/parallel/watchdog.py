"""The watchdog: if a rank fails, dies, hangs or stops answering, all ranks end the run with one line that names it.

A heartbeat is the step, phase and time of a rank's last progress, in memory and in a file per rank. The verdict is the
line, from what all ranks have published in the process group's key-value store.
"""

import json
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from tost_lm.command_line import EXIT_INTERRUPTED, EXIT_STOPPED, EXIT_TERMINATED
from tost_lm.errors import LostRankError, TostError
from tost_lm.files import regular_file
from tost_lm.parallel import timeouts
from tost_lm.parallel.launch import record_lost_rank
from tost_lm.parallel.timeouts import STORE_S, Timeouts
from tost_lm.torch_internals import dump_flight_record, is_communication_error, new_store_connection

ENDED = {
    "exited: KeyboardInterrupt": EXIT_INTERRUPTED,
    f"exited: SystemExit: {EXIT_TERMINATED}": EXIT_TERMINATED,
}
"""End of the line of a rank that a signal has ended → exit code of all ranks."""
_instances = count()  # the store keeps the keys of earlier instances


class StoreTimeoutError(dist.DistStoreError):
    """The store does not respond on an open connection: its host is cut off, or its process was stopped."""


class TimeoutStore:
    """Keys of the process group's store, apart from those of other instances; all ranks create it together.

    torch's store waits without limit, or for the rendezvous timeout. Each method here raises
    torch.distributed.DistError if the connection is broken, and StoreTimeoutError after STORE_S.
    """

    def __init__(self, name: str) -> None:
        # A connection of its own, because a waiting request blocks the others on its connection.
        self._store = PrefixStore(f"tost_lm/{name}/{next(_instances)}", new_store_connection())
        self._late: Future[Any] | None = None

    def set(self, key: str, value: str) -> None:
        self._request(lambda: self._store.set(key, value))

    def set_if_new(self, key: str, value: str) -> str:
        """Set a key that is not set. Returns its value, perhaps an earlier one."""
        return self._request(lambda: self._store.compare_set(key, "", value)).decode()

    def get(self, key: str) -> str:
        """The value of a key; empty: it is not set."""
        return self._request(lambda: self._store.get(key) if self._store.check([key]) else b"").decode()

    def _request(self, request: Callable[[], Any]) -> Any:
        if not self._late or self._late.done():
            response = Future[Any]()
            threading.Thread(target=_respond, args=(request, response), daemon=True).start()
            try:
                return response.result(STORE_S)
            except TimeoutError:
                self._late = response
        raise StoreTimeoutError(f"the store has not responded for {STORE_S:g} s")


def _respond(request: Callable[[], Any], response: Future[Any]) -> None:
    try:
        response.set_result(request())
    except Exception as error:
        response.set_exception(error)


Phase = Literal["building", "reading", "training", "validation", "saving", "leaving"]
PHASES: tuple[Phase, ...] = get_args(Phase)  # in the order of a step
LINE_BYTES = 256  # of every file, so that a line overwrites the previous one


class HeartbeatRecord(NamedTuple):
    rank: int
    host: str = ""
    pid: int = 0
    step: int = 0
    phase: Phase | Literal[""] = ""  # empty: the rank has no heartbeat
    time: float = 0.0  # Unix time [s] by the host's clock


class Heartbeat:
    """This rank's heartbeat: `last` is the newest record, `recorded_at` its time.monotonic() [s].

    The first record, "building", is in memory only, since the run folder does not exist yet.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.last = HeartbeatRecord(rank, socket.gethostname(), os.getpid(), 0, "building", time.time())
        self.recorded_at = time.monotonic()
        self._written_at, self._is_to_be_written, self._writing = -math.inf, False, threading.Lock()

    def record(self, step: int, phase: Phase) -> None:
        """Record progress at each tile, step and change of phase.

        The file has it at once if this begins a phase that not every step has. Else it is written once in WRITE_S, in
        this call or by a thread, with the newest record: thousands of ranks share a file system.
        """
        is_rare = phase not in (self.last.phase, "reading", "training")
        self.recorded_at = time.monotonic()
        self.last = self.last._replace(step=step, phase=phase, time=round(time.time(), 3))
        wait_s = self._written_at + timeouts.WRITE_S - self.recorded_at
        if is_rare or wait_s <= 0:
            self._write()
        elif not self._is_to_be_written:
            self._is_to_be_written, writer = True, threading.Timer(wait_s, self._write)
            writer.daemon = True
            writer.start()

    def _write(self) -> None:
        """Takes about 20 µs, without fsync."""
        with self._writing, suppress(OSError):  # informative only: whoever must write reports a full or lost disk
            self._is_to_be_written = False  # before the record is read: a later one then starts another thread
            line = json.dumps(self.last._asdict()).ljust(LINE_BYTES - 1) + "\n"
            if not self.folder.exists():  # at the start; not its run folder, which may have been moved
                self.folder.mkdir(exist_ok=True)
            # In place: replacing a file by renaming costs 1 ms on ext4, which writes its blocks at once.
            path = regular_file(self.folder / f"rank_{self.last.rank:05d}.json")
            file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
            try:
                os.pwrite(file, line.encode(), 0)
            finally:
                os.close(file)
            self._written_at = time.monotonic()


def read_heartbeats(folder: Path) -> dict[int, HeartbeatRecord]:
    """The last record of each rank with a valid file, in rank order."""
    records = {}
    for path in sorted(folder.glob("rank_*.json")):
        with suppress(OSError, ValueError, TypeError):
            line, again = regular_file(path).read_text(), path.read_text()
            while line != again:  # the rank wrote meanwhile
                line, again = again, path.read_text()
            record = HeartbeatRecord(**json.loads(line))
            records[record.rank] = record
    return records


RUNS, ANSWERS = "runs", "answers"
GONE, SILENT = "was lost: its process is gone", "was lost: it does not answer"
MAX_NAMED = 8


class RankState(NamedTuple):
    """The record that a rank publishes at the start, when it is polled, and at its end."""

    last: HeartbeatRecord
    status: str = RUNS
    """RUNS, ANSWERS or how it ended. A rank of its node publishes GONE for it."""

    @property
    def name(self) -> str:
        return f"rank {self.last.rank}" + (f" ({self.last.host}, pid {self.last.pid})" if self.last.host else "")

    @property
    def position(self) -> tuple[int, int, str]:
        """Sort key by progress, and the words for it."""
        step, phase = self.last[3:5]
        return (-1, 0, phase) if phase == "building" else (step, PHASES.index(phase), f"{phase} of step {step}")


def verdict(states: Sequence[RankState], files: Mapping[int, HeartbeatRecord], cause: str) -> str:
    """The line, from the states of all ranks after the poll and the records in the heartbeat files.

    `cause` is the error of the rank that asked; empty: its heartbeat timed out.
    """
    states = [state._replace(status=SILENT) if state.status == RUNS else state for state in states]
    if ended := [state for state in states if state.status != ANSWERS]:
        return _join([f"{state.name} {state.status}{_last_step(state, files)}" for state in ended])
    if all(state.last.phase for state in states) and (not cause or re.search("time(d )?out", cause, re.IGNORECASE)):
        return _hang(states)
    return f"communication failed although every rank answers: {cause}"


def _last_step(state: RankState, files: Mapping[int, HeartbeatRecord]) -> str:
    """The last step of a lost rank, from its heartbeat file if this process wrote it."""
    last = files.get(state.last.rank)
    if state.status not in (GONE, SILENT) or not last or last[:3] != state.last[:3]:
        return ""
    if last.phase == "building":
        return f"; it was building, {_seconds(last)} ago"
    return f"; its last step was {last.step} ({last.phase}, {_seconds(last)} ago)"


def _hang(states: Sequence[RankState]) -> str:
    """Names the ranks that are not at the most frequent position; in a tie, at the later one."""
    ranks_at = Counter(state.position for state in states)
    most = max(ranks_at, key=lambda position: (ranks_at[position], position))
    if len(states) == 1:
        return f"{states[0].name} hangs: {most[2]} for {_seconds(states[0].last)}"
    if len(ranks_at) == 1:
        newest = max(states, key=lambda state: state.last.time)
        return f"all ranks hang, though every rank answers: {most[2]} for {_seconds(newest.last)}"
    hung = [state for state in states if state.position != most]
    named = _join([f"{state.name} hangs: {state.position[2]} for {_seconds(state.last)}" for state in hung])
    return f"{named}, while {'the others' if len(ranks_at) == 2 else 'most'} wait in {most[2]}"


def _seconds(record: HeartbeatRecord) -> str:
    return f"{max(0, time.time() - record.time):.0f} s"  # clocks may differ


def _join(lines: Sequence[str]) -> str:
    return "; ".join([*lines[:MAX_NAMED], *[f"and {len(lines) - MAX_NAMED} more ranks"] * (len(lines) > MAX_NAMED)])


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
    watchdog = _Watchdog(heartbeat, limits or Timeouts()) if heartbeat or dist.get_world_size() > 1 else None
    before = signal.getsignal(signal.SIGTERM)

    def terminate(*_: object) -> None:
        if watchdog and watchdog.main_left.is_set():
            return
        # torchrun sends SIGTERM 0.1 s after a death, before a rank that waits for a live one has noticed it.
        if on_terminate is None or (watchdog and watchdog.is_needed()):
            sys.exit(EXIT_TERMINATED)
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

    Keys in the store: RANK: its RankState; asked: the first rank that asked for the line; line; printer: its rank;
    ended: a rank that ended by itself, with an error or not, so that others are not lost.
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
            self.store.set("ended", self.me)
            self.publish(self.state._replace(status=how))

    def fail(self, error: BaseException) -> None:
        """End the thread. Raise the line if this error comes from another rank; else publish it as the line."""
        if len(self.ranks) == 1:
            self.finish("")
            return
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
            os._exit(self.error.exit_code)

    def agree(self, cause: str) -> LostRankError:
        """Answer, ask for the line, and wait for it. `cause` is this rank's error."""
        try:
            error = LostRankError(self.poll(cause))
            error.exit_code = next((ENDED[end] for end in ENDED if str(error).endswith(end)), error.exit_code)
            is_lost = not self.store.get("ended")
            printer = self.me if self.has_own_end else self.store.set_if_new("printer", self.me)
            if self.read(int(printer)).status != ANSWERS:
                self.exit_s = timeouts.FAILED_EXIT_S
        except dist.DistError:
            host = f"the launcher on {os.environ['MASTER_ADDR']}" if self.launcher_has_store else "rank 0"
            error = LostRankError(f"{host} was lost: it held the rendezvous store")
            printer = str(self.node[0] or int(not self.launcher_has_store))  # one of each node: nodes may be cut off
            is_lost = True
        else:
            self.kill_silent(int(printer))
        error.printed_here = printer == self.me
        if is_lost:
            threading.Thread(target=record_lost_rank, daemon=True).start()  # its file system may hang
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
                states = [*map(self.read, self.ranks)]
                for silent in [state for state in states if state.status == RUNS]:
                    self.publish(silent._replace(status=SILENT))
                return self.store.set_if_new("line", verdict(states, files, cause))
            time.sleep(timeouts.POLL_S)
        return line

    def kill_silent(self, printer: int) -> None:
        """End the ranks of this node that do not answer: a stopped process gets no SIGTERM from the launcher, which
        would wait for it for half a minute. One that answers after all may be the printer."""
        for rank, state in self.neighbours.items():
            with suppress(dist.DistError, ProcessLookupError):
                if rank != printer and self.read(rank).status == SILENT:
                    os.kill(state.last.pid, signal.SIGKILL)

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
