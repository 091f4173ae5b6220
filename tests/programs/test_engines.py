"""Runs on `fully_shard` from checkpoints of DeepSpeed and of version 0.1.0, and back."""

import shutil
from pathlib import Path

import pytest
from programs import losses, run

import tost_lm
from tost_lm.testing import FLOAT32_REORDERED

VERSION_0_1_0 = Path(__file__).parents[1] / "golden/version_0_1_0"
"""Shards, and a run of eight steps with its checkpoint of step 4, as `tost` 0.1.0 wrote them on a CPU."""
LEGS = [
    (2, "deepspeed", "parallel.zero_stage=1"),
    (2, "fsdp", "parallel.zero_stage=3 memory.tile_tokens=24"),
    (0, "fsdp", ""),
    (2, "deepspeed", "parallel.zero_stage=2"),
]
"""Ranks, engine and settings of every three steps of a run."""


@pytest.mark.slow
def test_a_run_changes_its_engine(workplace: Path):
    run("tost train", "run.toml", "run.name=alone", cwd=workplace)
    for number, (ranks, engine, words) in enumerate(LEGS, start=1):
        last = [f"run.stop_at_step={3 * number}", f"parallel.engine={engine}"]
        run("tost train", "run.toml", *words.split(), *last, cwd=workplace, ranks=ranks)
    assert losses(workplace, "tiny") == pytest.approx(losses(workplace, "alone"), rel=FLOAT32_REORDERED)
    run("tost eval", "runs/tiny", "heldout", cwd=workplace)
    assert tost_lm.load(workplace / "runs/tiny").parameter_count() > 0


@pytest.mark.parametrize("engine", ["fsdp", pytest.param("deepspeed", marks=pytest.mark.slow)])
def test_a_checkpoint_of_version_0_1_0_resumes(engine: str, tmp_path: Path):
    """On shards of 0.1.0, with the losses that 0.1.0 itself had after this checkpoint."""
    shutil.copytree(VERSION_0_1_0, tmp_path, dirs_exist_ok=True)
    stored, metrics = losses(tmp_path, "old"), tmp_path / "runs/old/metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:4]))
    run("tost prepare inspect", "shards", cwd=tmp_path)
    printed = run("tost train", "run.toml", f"parallel.engine={engine}", cwd=tmp_path)
    assert "resuming from runs/old/checkpoints/step_00000004" in printed
    assert len(stored) == 8
    assert losses(tmp_path, "old") == pytest.approx(stored, rel=FLOAT32_REORDERED)
