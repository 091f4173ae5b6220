"""Which checkpoints stay, whether there is room for the next, and who writes which tensor."""

import math
from pathlib import Path
from typing import Any

import pytest

from tost_lm.config import validate
from tost_lm.errors import CheckpointError
from tost_lm.model.checkpoint import step_folder
from tost_lm.training.config import CheckpointConfig, PretrainConfig
from tost_lm.training.progress import Progress
from tost_lm.training.retention import prune, require_disk_space_for_run
from tost_lm.training.snapshot import assign_writers


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


def test_damaged_newer_ones_push_out_none(run: Path):
    (step_folder(run, 3) / "training.json").write_text("{")
    assert steps_left(run, 6, keep_latest_k=2) == [4, 5, 6, 7, 8]


def test_a_disk_that_is_too_small_for_the_run_is_detected(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(run.parent)

    def config(**checkpoint: Any) -> PretrainConfig:
        tree = {
            "model": {"layers": 1, "heads": 1, "width": 4, "vocab_size": 8, "max_positions": 8},
            "data": {"folder": "shards"},
            "train": {"steps": 30, "global_batch_size": 12, "micro_batch_size": 2, "seq_len": 8},
            "checkpoint": {"interval": 4, **checkpoint},
            "run": {"name": "r"},
        }
        return validate(PretrainConfig, tree, "test")

    exabyte = 10**18
    with pytest.raises(CheckpointError, match=r"saving 5 more checkpoints needs 5,000,000,\S+ bytes.*keep_latest_k 4"):
        require_disk_space_for_run(config(keep_latest_k=4), exabyte)
    with pytest.raises(CheckpointError, match="saving 8 more"):
        require_disk_space_for_run(config(keep_latest_k=20), exabyte)  # after 4, 8, … 28 and 30
    with pytest.raises(CheckpointError, match="saving 5 more"):
        require_disk_space_for_run(config(keep_latest_k=1, retain_interval=8), exabyte)
    require_disk_space_for_run(config(keep_latest_k=4), 1)
    # A run that goes on deletes what it has.
    Path("runs").mkdir()
    run.rename("runs/r")
    with pytest.raises(CheckpointError, match="checkpoints: a checkpoint needs 1,000,000,"):
        require_disk_space_for_run(config(keep_latest_k=4), exabyte)


def test_writers_have_even_loads_and_all_names():
    sizes = {f"p{number}": 1 + number**2 % 17 for number in range(40)}
    shares = assign_writers(sizes, 3)
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    loads = [sum(sizes[name] for name in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes.values())
    assert shares == assign_writers(dict(reversed(sizes.items())), 3)
    assert assign_writers({"a": 1, "b": 1}, 4) == [["a"], ["b"]]
