"""The verdict: one line, from what all ranks have published, that names the ranks that ended the run."""

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tost_lm.parallel.watchdog.heartbeat import PHASES, HeartbeatRecord

RUNS, ANSWERS = "runs", "answers"
GONE, SILENT = "was lost: its process is gone", "was lost: it does not answer"
MAX_NAMED = 8


class RankState(NamedTuple):
    """What a rank publishes at the start, when it is polled, and at its end."""

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
    """Of a lost rank, from its heartbeat file if this process wrote it."""
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
