"""Disks that are full or fail in a save: one error line, no partial checkpoint, and the same command resumes."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import checkpointed_training
import pytest
from launches import Launch, launch, train
from test_stopped_runs import assert_same_run, saved_steps

from tost_lm.checkpointing.run_folder import find_checkpoint
from tost_lm.config import load_config
from tost_lm.errors import ConfigError
from tost_lm.eval.commands import evaluate
from tost_lm.inference.ranks import Ranks
from tost_lm.tasks.settings import EvalConfig

Times = Callable[[int], int]
RecordFault = Callable[[str, int, str], None]
DISK_BYTES = 4 << 20


@pytest.fixture
def small_disk(workplace: Path) -> Iterator[Path]:
    """The folder of runs, on a small disk."""
    with checkpointed_training.small_disk(workplace / "runs", f"size={DISK_BYTES}") as runs:
        yield runs


def fill(disk: Path, leave_bytes: int) -> Path:
    filler = disk / "filler"
    free = os.statvfs(disk)
    try:
        filler.write_bytes(b"x" * max(free.f_bavail * free.f_frsize - leave_bytes, 0))
    except OSError:  # a run has written in the meantime
        os.truncate(filler, max(filler.stat().st_size - leave_bytes, 0))
    return filler


def assert_ends_in_one_line(running: Launch, *words: str) -> None:
    assert set(running.wait()) == {2}, running.output()
    line, *more = running.errors()
    assert not more, running.output()
    assert all(word in line for word in words), line


def test_a_read_only_run_folder_is_named(workplace: Path, small_disk: Path):
    train(workplace, 1, "run.stop_at_step=2")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with launch(workplace, 1) as running:
        assert_ends_in_one_line(running, "runs/tiny: cannot be written: Read-only file system; make it writable")


def test_an_evaluation_that_cannot_write_its_result_is_refused_before_it_scores(
    workplace: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
):
    train(workplace, 1, "run.stop_at_step=2")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    monkeypatch.chdir(workplace)
    monkeypatch.setattr(Ranks, "load", lambda *arguments: pytest.fail("the model was loaded"))
    line = r"runs/tiny/eval/heldout@bpb/results\.json: cannot be written: Read-only file system; make .*/tiny writable"
    with pytest.raises(ConfigError, match=line):
        evaluate.main(Path("runs/tiny"), load_config(EvalConfig, None, ["tasks=['heldout']"]))


@pytest.mark.slow
def test_a_full_disk_loses_nothing(
    workplace: Path, small_disk: Path, uninterrupted: Path, times: Times, record_fault: RecordFault
):
    filler = fill(small_disk, leave_bytes=60_000)
    with launch(workplace, 2) as running:  # too little space for a start
        assert_ends_in_one_line(running, "checkpoint", "bytes", "checkpoint.keep_latest_k")
    assert not saved_steps(small_disk / "tiny")
    for _ in range(times(5)):
        filler.unlink()
        with launch(workplace, 2) as running:
            newest = max(saved_steps(small_disk / "tiny"), default=0)
            running.until(lambda: max(saved_steps(small_disk / "tiny"), default=0) > newest)
            filler = fill(small_disk, leave_bytes=30_000)
            assert_ends_in_one_line(running, "checkpoint", "bytes")
        assert not list((small_disk / "tiny/checkpoints").glob(".step_*"))
        assert int(find_checkpoint(small_disk / "tiny").name[5:]) == max(saved_steps(small_disk / "tiny"))
    filler.unlink()
    newest = max(saved_steps(small_disk / "tiny"))
    with launch(workplace, 2) as running:  # too little space for a row of metrics
        running.until(lambda: running.step() > newest + 12)
        filler = fill(small_disk, leave_bytes=0)
        assert_ends_in_one_line(running, "runs/tiny/")
    filler.unlink()
    train(workplace, 2)
    assert_same_run(small_disk / "tiny", uninterrupted)
    record_fault(
        "disk full (tmpfs)", times(5) + 2, "refused at the start, or one line; no partial checkpoint; bit-exact"
    )


@pytest.mark.slow
def test_an_async_save_that_fails_ends_the_run(
    workplace: Path, uninterrupted: Path, times: Times, record_fault: RecordFault
):
    checkpoints = workplace / "runs/tiny/checkpoints"
    for _ in range(times(5)):
        with launch(workplace, 2) as running:
            newest = max(saved_steps(workplace / "runs/tiny"), default=0)
            running.until(lambda: max(saved_steps(workplace / "runs/tiny"), default=0) > newest)
            checkpoints.rename(workplace / "aside")
            checkpoints.write_text("a file instead of the folder")
            assert_ends_in_one_line(running, "checkpoints")
        checkpoints.unlink()
        (workplace / "aside").rename(checkpoints)
    train(workplace, 2)
    assert_same_run(workplace / "runs/tiny", uninterrupted)
    record_fault("an asynchronous save fails", times(5), "a later step raises it, exit code 2; then bit-exact")
