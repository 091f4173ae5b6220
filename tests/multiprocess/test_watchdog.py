"""The error line of the remaining ranks when one is killed, fails, does not answer or is slow."""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from tost_lm.errors import LostRankError, TostError
from tost_lm.parallel import timeouts
from tost_lm.parallel.graceful_stop import GracefulStop
from tost_lm.parallel.watchdog import watch_ranks
from tost_lm.testing import run_on_ranks


class SumOverRanksInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        dist.all_reduce(dy)
        return dy


def all_meet() -> None:
    dist.all_reduce(torch.ones(1000))


def kill_this_rank_while_the_others_wait() -> None:
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)


def rank_0_dies() -> None:
    if dist.get_rank() == 0:
        kill_this_rank_while_the_others_wait()
    all_meet()


def rank_1_dies_in_the_backward() -> None:
    y = SumOverRanksInBackward.apply(torch.ones(3, requires_grad=True))
    if dist.get_rank() == 1:
        kill_this_rank_while_the_others_wait()
    y.sum().backward()


def rank_2_dies_and_the_error_is_wrapped() -> None:
    if dist.get_rank() == 2:
        kill_this_rank_while_the_others_wait()
    try:
        all_meet()
    except RuntimeError as error:
        raise ValueError("the step did not work") from error


def rank_1_dies_in_a_second_use() -> None:
    with watch_ranks():
        all_meet()
    with watch_ranks():
        if dist.get_rank() == 1:
            kill_this_rank_while_the_others_wait()
        all_meet()


def rank_2_has_another_length() -> None:
    if dist.get_rank() == 2:
        raise ValueError("17 tokens where 16 were agreed\nand this much more about it")
    all_meet()


def rank_1_is_interrupted() -> None:
    if dist.get_rank() == 1:
        raise KeyboardInterrupt
    all_meet()


def rank_1_is_terminated() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    all_meet()


def rank_1_stops() -> None:
    timeouts.ANSWER_S = 3.0
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(1), group=group)


def rank_1_is_slow() -> None:
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    if dist.get_rank() == 1:
        time.sleep(1.5)
    dist.all_reduce(torch.ones(1), group=group)


LOST = "lost"
ENDED = {rank_1_is_interrupted: 130, rank_1_is_terminated: 143}


def watched(fault: Callable[[], None], notes: Path) -> None:
    """Call `fault` inside watch_ranks and write its LostRankError to a file."""
    timeouts.EXIT_S = 100.0  # of a test machine, however slow it is
    os.environ["LOST_RANK_FILE"] = str(notes / LOST)
    try:
        with watch_ranks():
            all_meet()
            fault()
    except LostRankError as error:
        (notes / str(dist.get_rank())).write_text(json.dumps([str(error), error.printed_here, error.exit_code]))
        raise


def line_of(fault: Callable[[], None], notes: Path, raised_on: list[int], is_lost: bool = True) -> tuple[str, str]:
    """The error line that exactly the ranks `raised_on` raise and one prints, and the report of run_on_ranks.

    They record a lost rank if it `is_lost`, and not if it ended by itself.
    """
    with pytest.raises(RuntimeError) as report:
        run_on_ranks(watched, 3, fault, notes)
    assert (notes / LOST).exists() == is_lost
    raised = {int(note.name): json.loads(note.read_text()) for note in notes.iterdir() if note.name != LOST}
    assert sorted(raised) == raised_on, report.value
    (line,) = {line for line, *_ in raised.values()}
    assert "\n" not in line
    assert sum(printed_here for _, printed_here, _ in raised.values()) == 1
    assert {code for *_, code in raised.values()} == {ENDED.get(fault, 2)}
    assert str(report.value).count(f"LostRankError: {line}\n") == len(raised_on)
    return line, str(report.value)


@pytest.mark.parametrize(
    ("fault", "lost"),
    [
        (rank_0_dies, 0),
        pytest.param(rank_1_dies_in_the_backward, 1, marks=pytest.mark.quick),
        (rank_2_dies_and_the_error_is_wrapped, 2),
        (rank_1_dies_in_a_second_use, 1),
    ],
)
def test_a_killed_rank_is_named(fault: Callable[[], None], lost: int, tmp_path: Path):
    line, report = line_of(fault, tmp_path, [rank for rank in range(3) if rank != lost])
    assert re.fullmatch(rf"rank {lost} \({os.uname().nodename}, pid \d+\) was lost: its process is gone", line)
    assert report.startswith(f"rank {lost} died with exit code -9")
    assert "gloo" not in report


def test_a_rank_that_fails_is_named_with_its_error(tmp_path: Path):
    line, report = line_of(rank_2_has_another_length, tmp_path, [0, 1], is_lost=False)
    assert line == "rank 2 failed: ValueError: 17 tokens where 16 were agreed"
    assert "ValueError: 17 tokens where 16 were agreed\nand this much more about it\n" in report


@pytest.mark.parametrize(
    ("fault", "reason"), [(rank_1_is_interrupted, "KeyboardInterrupt"), (rank_1_is_terminated, "SystemExit: 143")]
)
def test_a_rank_that_exits_is_named(fault: Callable[[], None], reason: str, tmp_path: Path):
    line, report = line_of(fault, tmp_path, [0, 2], is_lost=False)
    assert line == f"rank 1 exited: {reason}"
    assert f"\n{reason}\n" in report


def rank_1_fails_later_with_the_error_of_rank_0(printed_here: bool | None) -> bool | None:
    timeouts.EXIT_S = 100.0
    error = TostError("the disk is full")
    error.printed_here = printed_here

    def fail() -> None:
        with watch_ranks():
            if dist.get_rank() == 1:
                time.sleep(2)  # rank 0 has failed by then, and no rank has printed a line
            raise error

    with pytest.raises(TostError, match="the disk is full"):
        fail()
    return error.printed_here


@pytest.mark.parametrize(("printed_here", "printed"), [(False, [False, True]), (None, [None, False])])
def test_an_error_of_two_ranks_is_printed_by_one(printed_here: bool | None, printed: list[bool | None]):
    assert run_on_ranks(rank_1_fails_later_with_the_error_of_rank_0, 2, printed_here) == printed


@pytest.mark.quick
def test_a_rank_that_does_not_answer_is_named(tmp_path: Path):
    line, _ = line_of(rank_1_stops, tmp_path, [0, 2])
    assert re.fullmatch(r"rank 1 \(.+, pid \d+\) was lost: it does not answer", line)


def test_a_slow_rank_is_not_reported_as_lost(tmp_path: Path):
    line, _ = line_of(rank_1_is_slow, tmp_path, [0, 1, 2])
    assert line.startswith("communication failed although every rank answers: RuntimeError: ")
    assert "imed out" in line or "imeout" in line


def hang_when_rank_1_dies(stderr: Path) -> None:
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    with watch_ranks():
        all_meet()
        if dist.get_rank() == 1:
            kill_this_rank_while_the_others_wait()
        # Like a kernel that waits for a peer: no signal returns control to Python.
        _get_default_store().get("never set")


def test_ranks_that_hang_without_an_error_are_ended_with_an_error_line(tmp_path: Path):
    with pytest.raises(RuntimeError) as report:
        run_on_ranks(hang_when_rank_1_dies, 3, tmp_path / "stderr")
    assert [f"rank {rank} died with exit code {code}" for rank, code in ((0, 2), (1, -9), (2, 2))] == str(
        report.value
    ).splitlines()
    (line,) = (tmp_path / "stderr").read_text().splitlines()
    assert re.fullmatch(r"error: rank 1 \(.+, pid \d+\) was lost: its process is gone", line)


def state_after_a_run_without_faults() -> list[object]:
    before = signal.getsignal(signal.SIGTERM), threading.active_count()
    with watch_ranks():
        all_meet()
        time.sleep(0.8)  # several polls
        inside = signal.getsignal(signal.SIGTERM), threading.active_count()
    dist.barrier()
    store = _get_default_store()
    statuses = [json.loads(store.get(f"tost_lm/watchdog/0/{rank}"))[1] for rank in range(3)]
    keys_of_faults = [store.check([f"tost_lm/watchdog/0/{key}"]) for key in ("asked", "line", "printer")]
    after = signal.getsignal(signal.SIGTERM), threading.active_count()
    return [before == after, inside == before, inside[1] > before[1], *statuses, *keys_of_faults]


def test_a_run_without_faults_leaves_no_threads_and_no_handler():
    expected = [True, False, True, *["had finished"] * 3, False, False, False]
    assert run_on_ranks(state_after_a_run_without_faults, 3) == [expected] * 3


def rank_0_is_stopped_before_training() -> None:
    graceful_stop = GracefulStop()
    with watch_ranks():
        if dist.get_rank() == 0:
            graceful_stop.request()

        def compare() -> str:
            graceful_stop.request()
            all_meet()
            return ""

        graceful_stop.start_training(compare)


def test_ranks_that_are_stopped_before_and_in_the_first_comparison_end_gracefully():
    with pytest.raises(RuntimeError) as report:
        run_on_ranks(rank_0_is_stopped_before_training, 2)
    last_lines = re.findall(r"^(\w[\w.]*(?:Error|Exit): .*)$", str(report.value), re.MULTILINE)
    assert [line for line in last_lines if line == "SystemExit: 75"] == ["SystemExit: 75"] * 2
    assert "LostRankError" not in str(report.value)
