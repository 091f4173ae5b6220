"""Runs on `fully_shard` from checkpoints of DeepSpeed and of version 0.1.0, and back."""

import shutil
from pathlib import Path

import pytest
from programs import curve, run

import tost_lm
from tost_lm.testing import FLOAT32_REORDERED

FROZEN = Path(__file__).parents[1] / "golden/frozen"
LEGS = [
    (2, "deepspeed", "parallel.zero_stage=1"),
    (2, "fsdp", "parallel.zero_stage=3 memory.tile_tokens=24"),
    (0, "fsdp", ""),
    (2, "deepspeed", "parallel.zero_stage=2"),
]
"""Ranks, engine and settings of every three steps of a run."""


def losses(folder: Path, name: str) -> list[float]:
    return [loss for _, loss, *_ in curve(folder, name)]


@pytest.mark.slow
def test_a_run_changes_its_engine(workplace: Path):
    run("tost train", "run.toml", "run.name=alone", cwd=workplace)
    for number, (ranks, engine, words) in enumerate(LEGS, start=1):
        last = [f"run.stop_at_step={3 * number}", f"parallel.engine={engine}"]
        run("tost train", "run.toml", *words.split(), *last, cwd=workplace, ranks=ranks)
    assert losses(workplace, "tiny") == pytest.approx(losses(workplace, "alone"), rel=FLOAT32_REORDERED)
    run("tost eval", "runs/tiny", "heldout", cwd=workplace)
    assert tost_lm.load(workplace / "runs/tiny").parameter_count() > 0


@pytest.mark.slow
def test_a_checkpoint_of_version_0_1_0_resumes(tmp_path: Path):
    for name in ("shards", "run.toml"):
        (tmp_path / name).symlink_to(FROZEN / name)
    found = {}
    for engine in ("deepspeed", "fsdp"):
        shutil.copytree(FROZEN / "runs", tmp_path / "runs", dirs_exist_ok=True)
        run("tost train", "run.toml", "run.name=golden", f"parallel.engine={engine}", cwd=tmp_path)
        found[engine] = losses(tmp_path, "golden")
        shutil.rmtree(tmp_path / "runs")
    assert len(found["fsdp"]) > 2
    assert found["fsdp"] == pytest.approx(found["deepspeed"], rel=FLOAT32_REORDERED)
