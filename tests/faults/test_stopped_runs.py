"""A run that is killed, preempted, stopped by its time limit or launched twice equals one without a stop, bitwise."""

import random
import signal
import socket
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from launches import launch, train

from tost_lm.checkpointing import writer
from tost_lm.files import read_rows

Times = Callable[[int], int]
RecordFault = Callable[[str, int, str], None]
TICK_S = 0.05
"""The resolution of the clocks of files and processes."""


def curve(run_folder: Path) -> list[tuple[float, ...]]:
    rows = read_rows(run_folder / "metrics.jsonl")
    return [(row["step"], row["loss"], row["grad_norm"], row["lr"], row["tokens"]) for row in rows]


def tensors(run_folder: Path, step: int = 300) -> dict[str, bytes]:
    folder = run_folder / f"checkpoints/step_{step:08d}"
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def saved_steps(run_folder: Path) -> list[int]:
    return [int(folder.name[5:]) for folder in (run_folder / "checkpoints").glob("step_*")]


def assert_same_run(run_folder: Path, expected: Path, steps: int = 300) -> None:
    """Bitwise equal losses and norms of every step, and final weights and optimizer state."""
    assert curve(run_folder) == curve(expected)
    assert tensors(run_folder, steps) == tensors(expected, steps)
    assert tensors(expected, steps)


@pytest.mark.quick
def test_ranks_killed_at_random(workplace: Path, times: Times, record_fault: RecordFault):
    draws, count, steps, step, saved = random.Random(1), times(5), 100, 0, 0
    words = f"train.steps={steps}"
    train(workplace, 2, words)
    uninterrupted = (workplace / "runs/tiny").rename(workplace / "runs/uninterrupted")
    for _ in range(count):
        kill_at = draws.randint(saved + 1, saved + steps // (count + 1))
        lost = draws.randrange(2)
        with launch(workplace, 2, words) as running:
            running.until(lambda: running.step() >= kill_at)
            running.send(signal.SIGKILL, lost)
            assert sorted(running.wait()) == [-signal.SIGKILL, 2], running.output()
            (line,) = running.errors()
            assert line.startswith(f"rank {lost} (")
            assert f"pid {running.pids[lost]}) was lost: its process is gone" in line
            step = running.step(1 - lost)
        saved = max(saved_steps(workplace / "runs/tiny"), default=0)
        # The newest save may be unfinished; it began after the one before it was complete.
        assert saved >= (step // 10 - 1) * 10, "more than one interval and one unfinished save is lost"
    begins = f"resuming from runs/tiny/checkpoints/step_{saved:08d}" if saved else "from the start"
    assert begins in train(workplace, 2, words)
    assert_same_run(workplace / "runs/tiny", uninterrupted, steps)
    outcome = "the error names it; at most one interval and one unfinished save lost; bit-exact"
    record_fault(f"a rank killed in a run of {steps} steps", count, outcome)


PHASES = {
    "warm-up": lambda running: running.output(),
    "a step": lambda running: running.step() > 20 and running.heartbeat()["phase"] == "training",
    "evaluation": lambda running: running.step() > 5 and running.heartbeat()["phase"] == "validation",
    "a save": lambda running: running.heartbeat().get("phase") == "saving",
    "reading": lambda running: running.step() > 30 and running.heartbeat()["phase"] == "reading",
}


@pytest.mark.slow
def test_preemption_loses_no_step(workplace: Path, uninterrupted: Path, record_fault: RecordFault):
    words = ("validation.interval=3", "validation.sequences=4", "train.steps=300")
    reached = 0
    for number, (phase, is_reached) in enumerate(PHASES.items()):
        signum = signal.SIGUSR1 if number % 2 else signal.SIGTERM
        with launch(workplace, 2, *words) as running:
            if phase != "warm-up":
                running.until(lambda: running.step() > reached)
            running.until(lambda: is_reached(running))
            running.send(signum)
            assert running.wait() == [75, 75], (phase, running.output())
            assert not running.errors()
            steps = saved_steps(workplace / "runs/tiny")
            if phase != "warm-up":
                assert max(steps) == read_rows(workplace / "runs/tiny/metrics.jsonl")[-1]["step"]
                assert f"stopped on {signum.name} with everything saved" in running.output()
                reached = max(steps)
    train(workplace, 2, *words)
    assert_same_run(workplace / "runs/tiny", uninterrupted)
    record_fault(
        "preemption: SIGTERM, SIGUSR1 (step, evaluation, save, warm-up, reading)", 5, "exit code 75; no step lost"
    )


MANY_MICRO_BATCHES = ("model.width=128", "model.layers=4", "train.micro_batch_size=1", "run.name=slow")


@pytest.mark.slow
def test_a_stop_in_a_step_abandons_it_after_a_micro_batch(workplace: Path, record_fault: RecordFault):
    words = (*MANY_MICRO_BATCHES, "train.global_batch_size=100", "train.steps=2")
    train(workplace, 2, *words)
    (workplace / "runs/slow").rename(workplace / "runs/whole")
    with launch(workplace, 2, *words) as running:
        running.until(lambda: running.step() == 1 and running.heartbeat()["phase"] == "training")
        running.send(signal.SIGTERM, 1)
        assert running.wait() == [75, 75], running.output()
        assert "stopped on SIGTERM with everything saved" in running.output()
        assert saved_steps(workplace / "runs/slow") == [1], "the step was finished"
    train(workplace, 2, *words)
    assert curve(workplace / "runs/slow") == curve(workplace / "runs/whole")
    assert tensors(workplace / "runs/slow", 2) == tensors(workplace / "runs/whole", 2)
    record_fault("preemption in the middle of a step", 1, "exit code 75; the step is abandoned and repeated; bit-exact")


def test_a_stop_in_a_validation_ends_it_after_a_micro_batch(workplace: Path, record_fault: RecordFault):
    words = (*MANY_MICRO_BATCHES, "validation.interval=1", "validation.sequences=400", "train.steps=9")
    with launch(workplace, 2, *words) as running:
        running.until(lambda: running.step() == 1 and running.heartbeat()["phase"] == "validation")
        running.send(signal.SIGTERM)
        assert running.wait() == [75, 75], running.output()
    assert saved_steps(workplace / "runs/slow") == [1]
    assert read_rows(workplace / "runs/slow/validation.jsonl") == [], "the validation was finished"
    record_fault("preemption in the middle of a validation", 1, "exit code 75; the validation is not recorded")


@pytest.mark.slow
def test_a_first_ctrl_c_saves_and_a_second_ends_at_once(
    workplace: Path, uninterrupted: Path, record_fault: RecordFault
):
    with launch(workplace, 2) as running:
        running.until(lambda: running.step() > 20)
        running.send(signal.SIGINT)
        assert running.wait() == [75, 75], running.output()
        assert running.output().count("press Ctrl-C again") == 1
        assert "stopped on SIGINT with everything saved" in running.output()
    train(workplace, 2)
    assert_same_run(workplace / "runs/tiny", uninterrupted)
    words = (*MANY_MICRO_BATCHES, "train.micro_batch_size=200", "train.global_batch_size=800")
    with launch(workplace, 2, *words, "model.layers=24", "model.width=256") as running:
        running.until(lambda: running.step() == 0 and running.heartbeat()["phase"] == "training")
        running.send(signal.SIGINT)
        time.sleep(1.5)  # shorter than the micro-batch
        running.send(signal.SIGINT)
        assert running.wait() == [130, 130], running.output()
    record_fault("Ctrl-C", 2, "the first saves, exit code 75; the second ends at once, exit code 130")


SAVE_S = 2.0


def slow_saves(rank: int) -> None:
    publish = writer.publish_checkpoint

    def publish_late(*arguments: Any) -> None:
        time.sleep(SAVE_S)
        publish(*arguments)

    writer.publish_checkpoint = publish_late


@pytest.mark.slow
def test_the_time_limit_is_kept(workplace: Path, times: Times, record_fault: RecordFault):
    started = time.monotonic()
    train(workplace, 2, "train.steps=1", "run.name=short")
    limit_s = 6 * SAVE_S + 2 * (time.monotonic() - started)
    run = workplace / "runs/tiny"
    for _ in range(times(5)):
        before = max(saved_steps(run), default=0)
        words = (f"run.max_minutes={limit_s / 60}", "train.steps=100000")
        with launch(workplace, 2, *words, inject=slow_saves) as running:
            limit_at = min(psutil.Process(pid).create_time() for pid in running.pids) + limit_s
            assert running.wait() == [75, 75], running.output()
            assert "stopped on run.max_minutes" in running.output()
        newest = max((run / "checkpoints").glob("step_*"))
        rows = [row for row in read_rows(run / "metrics.jsonl") if row["step"] > before]
        assert rows[-1]["step"] == int(newest.name[5:])
        # The time that is left when a run stops covers two saves like those before, and a step like the longest.
        took = [new["seconds"] - old["seconds"] for old, new in pairwise(rows)]
        saved_at, last_row_at = ((path.stat().st_mtime) for path in (newest / "manifest.json", run / "metrics.jsonl"))
        longer_than_ever = max(0.0, saved_at - last_row_at - 2 * SAVE_S) + max(0.0, took[-1] - max(took[:-1]))
        assert saved_at < limit_at + longer_than_ever + TICK_S
    record_fault("time limit", times(5), "saved before the limit; exit code 75")


@pytest.mark.quick
def test_a_second_launch_is_refused_and_the_first_continues(workplace: Path, times: Times, record_fault: RecordFault):
    with launch(workplace, 2, "train.steps=100000") as first:
        first.until(lambda: first.step() > 3)
        (workplace / "second").mkdir()
        for link in ("shards", "runs", "run.toml"):
            (workplace / "second" / link).symlink_to(workplace / link)
        for _ in range(times(5)):
            with launch(workplace / "second", 1, "train.steps=100000") as second:
                assert second.wait() == [2]
                (line,) = second.errors()
                assert f"runs/tiny: another launch is using it (host {socket.gethostname()}, pid " in line
                assert f"pid {first.pids[0]})" in line
        before = first.step()
        first.until(lambda: first.step() > before)
        first.send(signal.SIGKILL)
    with launch(workplace, 2, "train.steps=100000") as third:  # a stale lock is ignored
        third.until(lambda: third.step() > before)
    record_fault("two launches on one run folder", times(5), "the second is refused; a stale lock is ignored")
