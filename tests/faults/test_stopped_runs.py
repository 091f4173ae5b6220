"""A run that is killed, preempted, cut short by its time limit or started twice goes on as if it had not been."""

import random
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launches import launch, train

from tost_lm.files import read_rows

Times = Callable[[int], int]
Survived = Callable[[str, int, str], None]


def curve(run_folder: Path) -> list[tuple[float, ...]]:
    rows = read_rows(run_folder / "metrics.jsonl")
    return [(row["step"], row["loss"], row["grad_norm"], row["lr"], row["tokens"]) for row in rows]


def tensors(run_folder: Path, step: int = 300) -> dict[str, bytes]:
    folder = run_folder / f"checkpoints/step_{step:08d}"
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def saved_steps(run_folder: Path) -> list[int]:
    return [int(folder.name[5:]) for folder in (run_folder / "checkpoints").glob("step_*")]


def assert_same_run(run_folder: Path, expected: Path) -> None:
    """To the bit: the losses and norms of every step, weights and optimizer in the end."""
    assert curve(run_folder) == curve(expected)
    assert tensors(run_folder) == tensors(expected)
    assert tensors(expected)


def test_ranks_killed_at_random(workplace: Path, never_stopped: Path, times: Times, survived: Survived):
    draws, count, step, begin = random.Random(1), times(5), 0, 0
    for _ in range(count):
        kill_at = draws.randint(begin + 1, begin + 300 // (count + 1))
        lost = draws.randrange(2)
        with launch(workplace, 2) as running:
            running.until(lambda: running.step() >= kill_at)
            running.send(signal.SIGKILL, lost)
            left = running.wait(20)
            assert sorted(left) == [-signal.SIGKILL, 2], running.said()
            (line,) = running.errors()
            assert line.startswith(f"rank {lost} (")
            assert f"pid {running.pids[lost]}) was lost: its process is gone" in line
            step = running.step(1 - lost)
        begin = max(
            (int(folder.name[5:]) for folder in (workplace / "runs/tiny/checkpoints").glob("step_*")), default=0
        )
        # The newest save may have been in the midst of being written; before it began, the one before it was whole.
        assert begin >= (step // 10 - 1) * 10, "more than an interval and a save that was being written is lost"
    said = train(workplace, 2)
    assert f"resuming from runs/tiny/checkpoints/step_{begin:08d}" in said
    assert_same_run(workplace / "runs/tiny", never_stopped)
    outcome = "named; at most an interval and a save in the making lost; bit-exact"
    survived("rank killed in a run of 300 steps", count, outcome)


PREEMPTED_IN = {
    "warm-up": lambda running: running.said(),
    "a step": lambda running: running.step() > 20 and running.heartbeat()["phase"] == "training",
    "evaluation": lambda running: running.step() > 5 and running.heartbeat()["phase"] == "validation",
    "a save": lambda running: running.heartbeat().get("phase") == "saving",
    "reading": lambda running: running.step() > 30 and running.heartbeat()["phase"] == "reading",
}


def test_preemption_loses_no_step(workplace: Path, never_stopped: Path, survived: Survived):
    words = ("validation.every=3", "validation.sequences=4", "train.steps=300")
    reached = 0
    for number, (where, is_there) in enumerate(PREEMPTED_IN.items()):
        signum = signal.SIGUSR1 if number % 2 else signal.SIGTERM
        with launch(workplace, 2, *words) as running:
            if where != "warm-up":
                running.until(lambda: running.step() > reached)
            running.until(lambda: is_there(running))
            running.send(signum)
            assert running.wait(30) == [75, 75], (where, running.said())
            assert not running.errors()
            steps = saved_steps(workplace / "runs/tiny")
            if where != "warm-up":
                assert max(steps) == read_rows(workplace / "runs/tiny/metrics.jsonl")[-1]["step"]
                assert f"left on {signum.name} with everything saved" in running.said()
                reached = max(steps)
    train(workplace, 2, *words)
    assert_same_run(workplace / "runs/tiny", never_stopped)
    survived("preemption: SIGTERM, SIGUSR1 (step, evaluation, save, warm-up, reading)", 5, "exit code 75, no step lost")


def test_the_time_limit_is_kept(workplace: Path, times: Times, survived: Survived):
    seconds = 5.0
    for _ in range(times(5)):
        started = time.time()
        with launch(workplace, 2, f"run.max_minutes={seconds / 60}", "train.steps=100000") as running:
            assert running.wait(30) == [75, 75], running.said()
            assert time.time() - started < seconds + 1.5  # the processes end after the limit, the save before
            assert "left on run.max_minutes" in running.said()
        newest = max((workplace / "runs/tiny/checkpoints").glob("step_*"))
        assert (newest / "manifest.json").stat().st_mtime < started + seconds
        assert read_rows(workplace / "runs/tiny/metrics.jsonl")[-1]["step"] == int(newest.name[5:])
    survived("time limit", times(5), "saved before the limit, exit code 75")


def test_a_second_launch_is_refused_and_the_first_goes_on(workplace: Path, times: Times, survived: Survived):
    with launch(workplace, 2, "train.steps=100000") as first:
        first.until(lambda: first.step() > 3)
        (workplace / "second").mkdir()
        for link in ("shards", "runs", "run.toml"):
            (workplace / "second" / link).symlink_to(workplace / link)
        for _ in range(times(5)):
            with launch(workplace / "second", 1, "train.steps=100000") as second:
                assert second.wait() == [2]
                (line,) = second.errors()
                assert f"runs/tiny: another launch is at work on it (host {socket.gethostname()}, pid " in line
                assert f"pid {first.pids[0]})" in line
        before = first.step()
        first.until(lambda: first.step() > before)
        first.send(signal.SIGKILL)
    with launch(workplace, 2, "train.steps=100000") as third:  # a stale lock is no obstacle
        third.until(lambda: third.step() > before)
    survived("two launchers on one run folder", times(5), "the second refused by name; a stale lock no obstacle")


@pytest.mark.parametrize("stops", [[7, 8, 150]])
def test_stopping_and_resuming_three_times(workplace: Path, never_stopped: Path, stops: list[int], survived: Survived):
    for stop in stops:
        train(workplace, 2, f"run.stop_step={stop}")
    train(workplace, 2)
    assert_same_run(workplace / "runs/tiny", never_stopped)
    survived("stop and resume", len(stops), "same losses, weights and optimizer to the bit")
