"""The line about the ranks that ended a run, from what the ranks have published."""

import re
import time

import pytest

from tost_lm.parallel.watchdog import ANSWERS, GONE, RUNS, HeartbeatRecord, Phase, RankState, verdict

pytestmark = pytest.mark.quick


def record(rank: int, step: int = 7, phase: Phase = "training", ago: float = 12.0, pid: int = 100) -> HeartbeatRecord:
    return HeartbeatRecord(rank, "node", pid + rank, step, phase, time.time() - ago)


def answers(*records: HeartbeatRecord) -> list[RankState]:
    return [RankState(last, ANSWERS) for last in records]


@pytest.mark.parametrize(
    ("status", "line"),
    [
        (RUNS, "was lost: it does not answer; its last step was 9 (saving, 3 s ago)"),
        (GONE, "was lost: its process is gone; its last step was 9 (saving, 3 s ago)"),
        ("failed: ValueError: no", "failed: ValueError: no"),
        ("had finished", "had finished"),
    ],
)
def test_a_rank_that_ended_is_named_however_the_others_hang(status: str, line: str):
    states = [*answers(record(0)), RankState(record(1), status), *answers(record(2, 8))]
    assert verdict(states, {1: record(1, 9, "saving", 3.0)}, "") == f"rank 1 (node, pid 101) {line}"


def test_the_last_step_comes_from_a_file_of_the_same_process():
    states = [*answers(record(0)), RankState(record(1), GONE)]
    assert verdict(states, {1: record(1, pid=7)}, "") == "rank 1 (node, pid 101) was lost: its process is gone"
    assert verdict(states, {1: record(1, 0, "building")}, "").endswith("is gone; it was building, 12 s ago")


def test_a_rank_that_published_nothing_has_only_its_number():
    assert (
        verdict([*answers(record(0)), RankState(HeartbeatRecord(1))], {}, "") == "rank 1 was lost: it does not answer"
    )


def test_at_most_eight_ranks_are_named():
    states = [RankState(HeartbeatRecord(rank)) for rank in range(12)]
    line = verdict(states, {}, "")
    assert re.findall(r"rank (\d+)", line) == [str(rank) for rank in range(8)]
    assert line.endswith("; and 4 more ranks")


@pytest.mark.parametrize(
    ("positions", "line"),
    [
        ([(7, "training")] * 3, "all ranks hang, though every rank answers: training of step 7 for 12 s"),
        (
            [(7, "training"), (7, "reading"), (7, "training")],
            "rank 1 (node, pid 101) hangs: reading of step 7 for 12 s, while the others wait in training of step 7",
        ),
        (  # in a tie, those that are behind
            [(7, "training"), (0, "building")],
            "rank 1 (node, pid 101) hangs: building for 12 s, while the others wait in training of step 7",
        ),
        (
            [(7, "training"), (7, "training"), (8, "reading"), (6, "saving")],
            "rank 2 (node, pid 102) hangs: reading of step 8 for 12 s; rank 3 (node, pid 103) hangs: saving of step 6 "
            "for 12 s, while most wait in training of step 7",
        ),
    ],
)
@pytest.mark.parametrize("cause", ["", "RuntimeError: Timed out waiting", "DistBackendError: ran into timeout"])
def test_after_a_timeout_ranks_at_another_position_are_named(positions: list[tuple[int, Phase]], line: str, cause: str):
    records = [record(rank, *position) for rank, position in enumerate(positions)]
    assert verdict(answers(*records), {}, cause) == line


def test_an_error_of_communication_is_reported_if_every_rank_answers():
    line = "communication failed although every rank answers: RuntimeError: {}"
    assert verdict(answers(record(0), record(1, 8)), {}, "RuntimeError: reset") == line.format("reset")
    without_heartbeats = answers(HeartbeatRecord(0), HeartbeatRecord(1))
    assert verdict(without_heartbeats, {}, "RuntimeError: Timed out") == line.format("Timed out")
