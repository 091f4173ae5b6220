"""One launch per run folder; which checkpoints stay in it, and whether there is room for the next."""

import errno
import fcntl
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stage_records import progress

from tost_lm.checkpointing.format import Progress
from tost_lm.checkpointing.run_folder import prune, require_disk_space_for_run, step_folder
from tost_lm.checkpointing.run_lock import run_lock
from tost_lm.checkpointing.settings import CheckpointConfig
from tost_lm.config import validate
from tost_lm.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.quick


def steps_left(run: Path, newest: int, **settings: int) -> list[int]:
    prune(step_folder(run, newest), validate(CheckpointConfig, settings, "test"))
    assert all(folder.name.startswith("step_") for folder in (run / "checkpoints").iterdir())
    return sorted(int(folder.name[5:]) for folder in (run / "checkpoints").iterdir())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Checkpoints after 1 to 8 steps, the lowest validation loss measured before the third, two leftovers."""
    run = tmp_path / "run"
    losses = [None, 2.0, 1.5, 1.5, math.nan, 1.75, 1.75, 1.6]
    for step, loss in enumerate(losses, start=1):
        step_folder(run, step).mkdir(parents=True)
        Progress(step, step, validation_loss=loss).write(step_folder(run, step))
    (run / "checkpoints/.step_00000009.tmp").mkdir()
    (run / "checkpoints/.step_00000004.old").mkdir()
    return run


def test_the_newest_the_best_and_multiples_stay(run: Path):
    assert steps_left(run, 8, keep_latest_k=2, retain_interval=4) == [3, 4, 7, 8]
    assert steps_left(run, 8, keep_latest_k=1) == [3, 8]


def test_the_best_is_that_of_the_stage(run: Path):
    """Losses of other lengths or texts do not compare."""
    stages = (*progress(8, 1, 4).stages, replace(progress(8, 1, 4).stages[0], first_step=4))
    Progress(8, 8, validation_loss=1.8, stages=stages).write(step_folder(run, 8))
    assert steps_left(run, 8, keep_latest_k=1) == [6, 8]


def test_damaged_newer_ones_push_out_none(run: Path):
    (step_folder(run, 3) / "training.json").write_text("{")
    assert steps_left(run, 6, keep_latest_k=2) == [4, 5, 6, 7, 8]


def test_a_disk_that_is_too_small_for_the_run_is_detected(run: Path):
    def require(folder: Path, checkpoint_bytes: int, step: int = 0, **settings: int) -> None:
        checkpoint = validate(CheckpointConfig, {"interval": 4, **settings}, "test")
        require_disk_space_for_run(folder, checkpoint, checkpoint_bytes, step, 30, keeps_best=False)

    new, exabyte = run.with_name("new"), 10**18
    with pytest.raises(CheckpointError, match=r"saving 5 more checkpoints needs 5,000,000,\S+ bytes.*keep_latest_k 4"):
        require(new, exabyte, keep_latest_k=4)
    with pytest.raises(CheckpointError, match="saving 8 more"):
        require(new, exabyte, keep_latest_k=20)  # after 4, 8, … 28 and 30
    with pytest.raises(CheckpointError, match="saving 5 more"):
        require(new, exabyte, keep_latest_k=1, retain_interval=8)
    require(new, 1, keep_latest_k=4)
    # A run that goes on deletes what it has.
    with pytest.raises(CheckpointError, match="checkpoints: a checkpoint needs 1,000,000,"):
        require(run, exabyte, step=8, keep_latest_k=4)


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path):
    run_folder = tmp_path / "runs/mine"
    run_folder.parent.mkdir()
    (tmp_path / "notes").write_text("kept")
    (run_folder.parent / ".mine.lock").symlink_to(tmp_path / "notes")
    line = r"the lock file \S+\.mine\.lock is a symbolic link; remove it"
    with pytest.raises(ConfigError, match=line), run_lock(run_folder, 0):
        pass
    assert (tmp_path / "notes").read_text() == "kept"


def test_a_file_system_without_locks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", fail)
    with run_lock(tmp_path / "mine", 0):
        pass
    line = f"warning: {tmp_path}/.mine.lock: No locks available: nothing prevents a second launch in {tmp_path}/mine\n"
    assert capsys.readouterr().out == line
