"""The ranks agree, through the store, on one line about what became of those that broke the run."""

import itertools
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from tost_lm.parallel.heartbeat import PHASES, Heartbeat, read_heartbeats
from tost_lm.parallel.patient_store import PatientStore

ROLL_CALL_S = 1.5  # what a rank may take to answer
LOOKS = 15  # and how often it is looked for: where this rank is slow, so are the others
LOOK_EVERY_S = 0.05
ANSWERS = "answers"
MOST_NAMED = 8
_uses = itertools.count()  # the store keeps what an earlier use said


class Position(NamedTuple):
    """Where the main thread of a rank stands."""

    step: int
    phase: str
    seconds: float
    """For how long."""

    def place(self) -> tuple[int, int]:
        """The further a rank has come, the larger."""
        return (self.step, PHASES.index(self.phase)) if self.phase != "building" else (-1, 0)

    def words(self, joint: str) -> str:
        return self.phase if self.phase == "building" else f"{self.phase}{joint}step {self.step}"


class RollCall:
    """This rank's part in it.

    In the store: member/RANK = host, pid and machine; callers = how many saw trouble; hung = set when nobody failed,
    but a rank made no progress; said/RANK = its answer, or how it ended; verdict = the line; printers = how many ranks
    were to print it.
    """

    def __init__(self, heart: Heartbeat | None) -> None:
        self.rank, self.size, self.heart = dist.get_rank(), dist.get_world_size(), heart
        self.store = PatientStore(f"tost_lm/failures/{next(_uses)}")
        self.launcher_holds_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        first = self.rank - int(os.environ.get("LOCAL_RANK", self.rank))
        self.node = range(first, min(self.size, first + int(os.environ.get("LOCAL_WORLD_SIZE", self.size))))
        self.machine, self.members = _machine(), dict[int, list[str]]()
        self.store.set(f"member/{self.rank}", f"{socket.gethostname()} {os.getpid()} {self.machine}")

    def sees_trouble(self) -> bool:
        return self.store.holds("callers") or bool(self._dead())

    def say(self, how: str) -> None:
        """How this rank ended; the others are not told to look."""
        self.store.set(f"said/{self.rank}", how)

    def say_first(self, how: str, prints_it: bool) -> None:
        """How this rank failed: the verdict, unless there is one."""
        if prints_it:
            self.store.add("printers", 1)
        self.store.set_if_new("verdict", f"rank {self.rank} {how}")
        self.store.add("callers", 1)

    def verdict(self, cause: str, hung: bool, is_leaving: Callable[[], bool]) -> str:
        """Answer, or call the others to, and wait until one rank has brought what was said into a line.

        Args:
            cause: what this rank saw, for the case that every rank answers.
            hung: it saw that there was no progress.
            is_leaving: ends the wait, with an empty line: this rank's main thread has said how it ended.
        """
        if hung:
            self.store.set("hung", "")
        position = self._position()
        self.store.set(f"said/{self.rank}", " ".join([ANSWERS, *map(str, position or ())]))
        everybody = [f"said/{rank}" for rank in range(self.size)]
        calls = self.store.add("callers", 1) == 1
        deadline = time.monotonic() + ROLL_CALL_S + (0 if calls else 2)  # the caller may die, too
        for look in itertools.count():
            if self.store.holds("verdict"):
                return self.store.get("verdict") or ""
            if is_leaving():
                return ""
            for rank in self._dead():
                self.store.set(f"said/{rank}", "was lost: its process is gone")
            if (calls and self.store.holds(*everybody)) or (look >= LOOKS and time.monotonic() > deadline):
                self.store.set_if_new("verdict", self._sum_up(cause))
            time.sleep(LOOK_EVERY_S)
        raise AssertionError

    def finds_a_hang(self) -> bool:
        return self.store.holds("hung")

    def is_the_one_to_print(self) -> bool:
        return self.store.add("printers", 1) == 1

    def without_store(self) -> tuple[str, bool]:
        """The line, and whether this rank prints it, where the store is lost: the first of each node does."""
        holder = f"the launcher on {os.environ['MASTER_ADDR']}" if self.launcher_holds_store else self._name(0)
        left = [rank for rank in self.node if (rank or self.launcher_holds_store) and not self._is_dead(rank)]
        last = "" if self.launcher_holds_store else self._last_step(0)
        return f"{holder} was lost: it held the store through which the ranks meet{last}", self.rank == min(
            left, default=self.rank
        )

    def _sum_up(self, cause: str) -> str:
        self._meet(range(self.size))
        said = [self._said(rank) or "was lost: it does not answer" for rank in range(self.size)]
        ended = [
            f"{self._name(rank)} {how}{self._last_step(rank) if 'was lost' in how else ''}"
            for rank, how in enumerate(said)
            if not how.startswith(ANSWERS)
        ]
        if ended:
            return _some(ended)
        positions = [_position(how) for how in said]
        known = [position for position in positions if position]
        if len(known) == self.size and self.finds_a_hang():
            return self._who_is_stuck(known)
        return f"communication broke, though every rank answers: {cause}"

    def _who_is_stuck(self, positions: list[Position]) -> str:
        """Those that stand elsewhere than the most; where two places have as many ranks, the further one counts."""
        ranks_at = Counter(position.place() for position in positions)
        place = max(ranks_at, key=lambda place: (ranks_at[place], place))
        waiting = next(position for position in positions if position.place() == place)
        if len(ranks_at) == 1:
            seconds = min(position.seconds for position in positions)
            return (
                f"no rank goes on, though every rank answers: all stand in {waiting.words(' of ')} for {seconds:.0f} s"
            )
        stuck = [
            f"{self._name(rank)} is stuck: {position.words(' ')} for {position.seconds:.0f} s"
            for rank, position in enumerate(positions)
            if position.place() != place
        ]
        others = "the others" if len(ranks_at) == 2 else "most"
        return f"{_some(stuck)}, while {others} wait in {waiting.words(' of ')}"

    def _position(self) -> Position | None:
        if self.heart is None:
            return None
        return Position(self.heart.last.step, self.heart.last.phase, time.monotonic() - self.heart.beaten_at)

    def _last_step(self, rank: int) -> str:
        """What the file of a lost rank says, if it is this process's."""
        beat = read_heartbeats(self.heart.folder).get(rank) if self.heart else None
        if not beat or self.members.get(rank, [])[:2] != [beat.host, str(beat.pid)]:
            return ""
        ago = f"{max(0, time.time() - beat.time):.0f} s ago"  # clocks may differ
        if beat.phase == "building":
            return f"; it was building, {ago}"
        return f"; its last step was {beat.step} ({beat.phase}, {ago})"

    def _dead(self) -> list[int]:
        """The ranks of this node that ended without a word."""
        self._meet(self.node)
        dead = [rank for rank in self.node if self._is_dead(rank)]
        return [rank for rank in dead if (self._said(rank) or ANSWERS).startswith(ANSWERS)]

    def _meet(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank not in self.members and (member := self.store.get(f"member/{rank}")):
                self.members[rank] = member.split()

    def _said(self, rank: int) -> str | None:
        return self.store.get(f"said/{rank}")

    def _is_dead(self, rank: int) -> bool:
        _, pid, machine = self.members.get(rank, ("", "", ""))
        return machine == self.machine and not Path("/proc", pid).exists()

    def _name(self, rank: int) -> str:
        return f"rank {rank}" + (" ({}, pid {})".format(*self.members[rank]) if rank in self.members else "")


def _position(said: str) -> Position | None:
    _, *words = said.split()
    return Position(int(words[0]), words[1], float(words[2])) if words else None


def _some(lines: list[str]) -> str:
    return "; ".join(lines[:MOST_NAMED]) + (f"; and {len(lines) - MOST_NAMED} ranks more" * (len(lines) > MOST_NAMED))


def _machine() -> str:
    """The same for processes to which process ids mean the same."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()}/{os.getpid()}"  # without /proc nothing is known of the others
