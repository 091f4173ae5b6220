"""pretrain.extend as a user runs it, and a second phase of training that begins from what it makes."""

import json
import shutil
from pathlib import Path

import pytest
from programs import refusal, run, snapshot

EXTEND = ["runs/tiny", "extend.max_positions=256", "extend.folder=models/long"]
SECOND_PHASE = [
    "run.toml", "train.initial_weights=models/long", "model.max_positions=256", "train.sequence_tokens=256",
    "train.steps=4", "checkpoint.every=2",
]  # fmt: skip


def losses(workplace: Path, name: str) -> list[float]:
    return [json.loads(line)["loss"] for line in (workplace / f"runs/{name}/metrics.jsonl").read_text().splitlines()]


def test_a_model_is_extended_and_trained_on_and_resumes_without_the_weights_it_began_from(workplace: Path):
    run("pretrain.train", "run.toml", "train.sequence_tokens=64", cwd=workplace)
    said = refusal("pretrain.extend", *EXTEND, cwd=workplace)
    assert [line.split(":")[0] for line in said.splitlines()] == ["extend.positions", "extend.denom_bias"]
    how = ["extend.positions=keep", "extend.denom_bias=keep"]
    *_, promise, next_command = run("pretrain.extend", *EXTEND, *how, cwd=workplace).splitlines()
    assert promise == "the logits of the first 64 positions are what they were, to the bit"
    assert next_command == "to train on: train.initial_weights=models/long model.max_positions=256"
    before = snapshot(workplace / "models")
    assert run("pretrain.extend", *EXTEND, *how, cwd=workplace).startswith("reusing models/long ")
    assert "exists, and is not" in refusal(
        "pretrain.extend", *EXTEND, *how[:1], "extend.denom_bias=head", cwd=workplace
    )

    said = run("pretrain.train", *SECOND_PHASE, "run.name=never_stopped", cwd=workplace)
    assert "with the weights of models/long" in said
    assert losses(workplace, "never_stopped")[0] == pytest.approx(losses(workplace, "tiny")[-1], rel=0.03)
    mixed = ["run.name=mixed", "parallel.tensor=2", "run.stop_step=1"]
    run("pretrain.train", *SECOND_PHASE, *mixed, cwd=workplace, ranks=2)
    assert losses(workplace, "mixed")[0] == pytest.approx(losses(workplace, "never_stopped")[0], rel=1e-5)
    said = refusal("pretrain.train", *SECOND_PHASE, "run.name=other", "model.layer_scale=0.5", cwd=workplace)
    assert said.splitlines()[1:] == ["model.layer_scale: 1.0 → 0.5"]
    assert not (workplace / "runs/other").exists()

    run("pretrain.train", *SECOND_PHASE, "run.name=stopped", "run.stop_step=2", cwd=workplace)
    assert snapshot(workplace / "models") == before
    shutil.rmtree(workplace / "models")
    said = run("pretrain.train", *SECOND_PHASE, "run.name=stopped", cwd=workplace)
    assert "resuming from runs/stopped/checkpoints/step_00000002" in said
    assert losses(workplace, "stopped") == losses(workplace, "never_stopped")
    events = [json.loads(line) for line in (workplace / "runs/stopped/events.jsonl").read_text().splitlines()]
    (begun,) = [event for event in events if event["event"] == "initial weights"]
    assert (begun["step"], begun["folder"], len(begun["manifest_sha256"])) == (0, "models/long", 64)
    said = refusal("pretrain.train", *SECOND_PHASE, "run.name=new", cwd=workplace)
    assert said.startswith("models/long: no such folder")
