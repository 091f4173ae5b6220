"""A second phase of training, on longer sequences than the first."""

import json
import shutil
from pathlib import Path

import pytest
from programs import losses, refusal, run, snapshot

from tost_lm.testing import FLOAT32_REORDERED

pytestmark = pytest.mark.quick

UNLIMITED = ["model.positions=none", "model.tssa.denom_bias=head"]
SECOND_PHASE = [
    "run.toml", *UNLIMITED, "train.initial_weights=models/first", "train.seq_len=256", "train.steps=4",
    "checkpoint.interval=2",
]  # fmt: skip


def test_it_starts_from_the_first_and_resumes_without_its_weights(workplace: Path):
    run("tost train", "run.toml", *UNLIMITED, cwd=workplace)
    shutil.copytree(workplace / "runs/tiny/checkpoints/step_00000012", workplace / "models/first")
    before = snapshot(workplace / "models")

    printed = run("tost train", *SECOND_PHASE, "run.name=never_stopped", cwd=workplace)
    assert "with the weights of models/first" in printed
    assert losses(workplace, "never_stopped")[0] == pytest.approx(losses(workplace, "tiny")[-1], rel=0.03)
    mixed = ["run.name=mixed", "parallel.tensor=2", "run.stop_at_step=1"]
    run("tost train", *SECOND_PHASE, *mixed, cwd=workplace, ranks=2)
    assert losses(workplace, "mixed")[0] == pytest.approx(losses(workplace, "never_stopped")[0], rel=FLOAT32_REORDERED)
    printed = refusal("tost train", *SECOND_PHASE, "run.name=other", "model.layer_scale=0.5", cwd=workplace)
    assert printed.splitlines()[1:] == ["model.layer_scale: 1.0 → 0.5"]
    assert not (workplace / "runs/other").exists()

    run("tost train", *SECOND_PHASE, "run.name=stopped", "run.stop_at_step=2", cwd=workplace)
    assert snapshot(workplace / "models") == before
    shutil.rmtree(workplace / "models")
    printed = run("tost train", *SECOND_PHASE, "run.name=stopped", cwd=workplace)
    assert "resuming from runs/stopped/checkpoints/step_00000002" in printed
    assert losses(workplace, "stopped") == losses(workplace, "never_stopped")
    events = [json.loads(line) for line in (workplace / "runs/stopped/events.jsonl").read_text().splitlines()]
    (started,) = [event for event in events if event["event"] == "initial weights"]
    assert (started["step"], started["folder"], len(started["manifest_sha256"])) == (0, "models/first", 64)
    printed = refusal("tost train", *SECOND_PHASE, "run.name=new", cwd=workplace)
    assert printed.startswith("models/first: no such folder")
