"""The poll of all ranks: through the store they agree on one line that names the ranks that ended the run."""

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from tost_lm.parallel.watchdog.heartbeat import PHASES, Heartbeat, read_heartbeats
from tost_lm.parallel.watchdog.store import TimeoutStore

RANK_RESPONSE_S = 1.5  # timeout of a rank's answer
MIN_CHECKS = 15  # checks before a rank counts as lost: if this rank is slow, so are others
CHECK_EVERY_S = 0.05
ANSWERS = "answers"
MAX_NAMED = 8
_instances = count()  # the store keeps the keys of earlier instances


class Position(NamedTuple):
    """Last heartbeat of a rank's main thread."""

    step: int
    phase: str
    seconds: float
    """Time since then [s]."""

    def order(self) -> tuple[int, int]:
        """Sort key by progress."""
        return (self.step, PHASES.index(self.phase)) if self.phase != "building" else (-1, 0)

    def describe(self) -> str:
        return self.phase if self.phase == "building" else f"{self.phase} of step {self.step}"


class RankPoll:
    """This rank's side of the poll.

    Keys in the store: process/RANK: host, pid and machine. requests: how many ranks requested the poll. hang: set if a
    heartbeat timed out. status/RANK: the rank's position, or how it ended. result: the line. printers: how many ranks
    claimed to print it.
    """

    def __init__(self, heartbeat: Heartbeat | None) -> None:
        self.rank, self.size, self.heartbeat = dist.get_rank(), dist.get_world_size(), heartbeat
        self.store = TimeoutStore(f"tost_lm/watchdog/{next(_instances)}")
        self.launcher_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        first = self.rank - int(os.environ.get("LOCAL_RANK", self.rank))
        self.node = range(first, min(self.size, first + int(os.environ.get("LOCAL_WORLD_SIZE", self.size))))
        self.machine, self.processes = _machine(), dict[int, list[str]]()
        self.store.set(f"process/{self.rank}", f"{socket.gethostname()} {os.getpid()} {self.machine}")

    def is_needed(self) -> bool:
        """Whether a rank requested the poll, or a rank of this node died."""
        return self.store.has("requests") or bool(self._dead())

    def report_end(self, how: str) -> None:
        """Publish how this rank ended, without requesting a poll."""
        self.store.set(f"status/{self.rank}", how)

    def report_failure(self, how: str, prints_it: bool) -> None:
        """Publish how this rank failed as the result, unless there is one, and request the poll."""
        if prints_it:
            self.store.add("printers", 1)
        self.store.set_if_new("result", f"rank {self.rank} {how}")
        self.store.add("requests", 1)

    def run(self, cause: str, hung: bool, is_ending: Callable[[], bool]) -> str:
        """Answer, request the poll, and wait for its result.

        Args:
            cause: this rank's error, reported if every rank answers.
            hung: this rank's heartbeat timed out.
            is_ending: whether this rank's main thread has reported how it ended; then the result is empty.
        """
        if hung:
            self.store.set("hang", "")
        self.store.set(f"status/{self.rank}", " ".join([ANSWERS, *map(str, self._position() or ())]))
        statuses = [f"status/{rank}" for rank in range(self.size)]
        is_first = self.store.add("requests", 1) == 1
        deadline = time.monotonic() + RANK_RESPONSE_S + (0 if is_first else 2)  # the first one may die, too
        checks = 0
        while not self.store.has("result"):
            if is_ending():
                return ""
            for rank in self._dead():
                self.store.set(f"status/{rank}", "was lost: its process is gone")
            is_late = checks >= MIN_CHECKS and time.monotonic() > deadline
            if is_late or (is_first and self.store.has(*statuses)):
                self.store.set_if_new("result", self._summary(cause))
            time.sleep(CHECK_EVERY_S)
            checks += 1
        return self.store.get("result") or ""

    def is_hang(self) -> bool:
        return self.store.has("hang")

    def claim_printing(self) -> bool:
        """Whether this rank is the first to claim it."""
        return self.store.add("printers", 1) == 1

    def store_lost(self) -> tuple[str, bool]:
        """The line if the store is lost, and whether this rank prints it, as the first live rank of its node."""
        host = f"the launcher on {os.environ['MASTER_ADDR']}" if self.launcher_has_store else self._name(0)
        last = "" if self.launcher_has_store else self._last_step(0)
        alive = [rank for rank in self.node if (rank or self.launcher_has_store) and not self._is_dead(rank)]
        return f"{host} was lost: it held the rendezvous store{last}", self.rank == min(alive, default=self.rank)

    def _summary(self, cause: str) -> str:
        self._load_processes(range(self.size))
        statuses = [self._status(rank) or "was lost: it does not answer" for rank in range(self.size)]
        ended = [
            f"{self._name(rank)} {status}{self._last_step(rank) if 'was lost' in status else ''}"
            for rank, status in enumerate(statuses)
            if not status.startswith(ANSWERS)
        ]
        if ended:
            return _join(ended)
        positions = [position for status in statuses if (position := _parse_position(status))]
        if len(positions) == self.size and self.is_hang():
            return self._hang(positions)
        return f"communication failed although every rank answers: {cause}"

    def _hang(self, positions: list[Position]) -> str:
        """Names the ranks that are not at the most frequent position; in a tie, at the later one."""
        ranks_at = Counter(position.order() for position in positions)
        place = max(ranks_at, key=lambda place: (ranks_at[place], place))
        waiting = next(position for position in positions if position.order() == place).describe()
        if len(ranks_at) == 1:
            seconds = min(position.seconds for position in positions)
            return f"all ranks hang, though every rank answers: {waiting} for {seconds:.0f} s"
        hung = [
            f"{self._name(rank)} hangs: {position.describe()} for {position.seconds:.0f} s"
            for rank, position in enumerate(positions)
            if position.order() != place
        ]
        return f"{_join(hung)}, while {'the others' if len(ranks_at) == 2 else 'most'} wait in {waiting}"

    def _position(self) -> Position | None:
        if self.heartbeat is None:
            return None
        last = self.heartbeat.last
        return Position(last.step, last.phase, time.monotonic() - self.heartbeat.recorded_at)

    def _last_step(self, rank: int) -> str:
        """From the heartbeat file of a lost rank, if this process wrote it."""
        record = read_heartbeats(self.heartbeat.folder).get(rank) if self.heartbeat else None
        if not record or self.processes.get(rank, [])[:2] != [record.host, str(record.pid)]:
            return ""
        ago = f"{max(0, time.time() - record.time):.0f} s ago"  # clocks may differ
        if record.phase == "building":
            return f"; it was building, {ago}"
        return f"; its last step was {record.step} ({record.phase}, {ago})"

    def _dead(self) -> list[int]:
        """Ranks of this node whose process died without reporting how it ended."""
        self._load_processes(self.node)
        dead = [rank for rank in self.node if self._is_dead(rank)]
        return [rank for rank in dead if (self._status(rank) or ANSWERS).startswith(ANSWERS)]

    def _load_processes(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank not in self.processes and (process := self.store.get(f"process/{rank}")):
                self.processes[rank] = process.split()

    def _status(self, rank: int) -> str | None:
        return self.store.get(f"status/{rank}")

    def _is_dead(self, rank: int) -> bool:
        _, pid, machine = self.processes.get(rank, ("", "", ""))
        return machine == self.machine and not Path("/proc", pid).exists()

    def _name(self, rank: int) -> str:
        return f"rank {rank}" + (" ({}, pid {})".format(*self.processes[rank]) if rank in self.processes else "")


def _parse_position(status: str) -> Position | None:
    _, *fields = status.split()
    return Position(int(fields[0]), fields[1], float(fields[2])) if fields else None


def _join(lines: list[str]) -> str:
    more = [f"and {len(lines) - MAX_NAMED} more ranks"] * (len(lines) > MAX_NAMED)
    return "; ".join([*lines[:MAX_NAMED], *more])


def _machine() -> str:
    """Equal for processes that share a process id namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()}/{os.getpid()}"  # without /proc, other processes cannot be checked
