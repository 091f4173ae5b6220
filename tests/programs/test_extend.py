"""`tost extend` as a user runs it, and a second phase of training with its result."""

import json
import shutil
from pathlib import Path

import pytest
from programs import refusal, run, snapshot

from tost_lm.testing import FLOAT32_REORDERED

EXTEND = ["runs/tiny", "extend.max_positions=256", "extend.folder=models/long"]
SECOND_PHASE = [
    "run.toml", "train.initial_weights=models/long", "model.max_positions=256", "train.seq_len=256",
    "train.steps=4", "checkpoint.interval=2",
]  # fmt: skip


def losses(workplace: Path, name: str) -> list[float]:
    return [json.loads(line)["loss"] for line in (workplace / f"runs/{name}/metrics.jsonl").read_text().splitlines()]


def test_an_extended_model_trains_and_resumes_without_its_initial_weights(workplace: Path):
    run("tost train", "run.toml", cwd=workplace)
    printed = refusal("tost extend", *EXTEND, cwd=workplace)
    assert [line.split(":")[0] for line in printed.splitlines()] == ["extend.positions", "extend.denom_bias"]
    how = ["extend.positions=keep", "extend.denom_bias=keep"]
    *_, promise, next_command = run("tost extend", *EXTEND, *how, cwd=workplace).splitlines()
    assert promise == "the logits of the first 64 positions are bitwise identical"
    assert next_command == "to continue training: train.initial_weights=models/long model.max_positions=256"
    card = (workplace / "models/long/README.md").read_text()
    assert "| context extended from | runs/tiny/checkpoints/step\\_00000012, manifest SHA-256 " in card
    before = snapshot(workplace / "models")
    assert run("tost extend", *EXTEND, *how, cwd=workplace).startswith("reusing models/long ")
    assert "exists and is not" in refusal("tost extend", *EXTEND, *how[:1], "extend.denom_bias=head", cwd=workplace)

    printed = run("tost train", *SECOND_PHASE, "run.name=never_stopped", cwd=workplace)
    assert "with the weights of models/long" in printed
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
    assert (started["step"], started["folder"], len(started["manifest_sha256"])) == (0, "models/long", 64)
    printed = refusal("tost train", *SECOND_PHASE, "run.name=new", cwd=workplace)
    assert printed.startswith("models/long: no such folder")
