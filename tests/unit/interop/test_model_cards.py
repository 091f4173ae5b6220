"""README.md of exported folders: what the records of a run contain, and nothing else."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from stage_records import FINGERPRINT, recorded

import tost_lm
from tost_lm.checkpointing.format import Progress, verify_checkpoint, write_checkpoint
from tost_lm.checkpointing.run_folder import step_folder
from tost_lm.config import to_toml, validate
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import CheckpointError
from tost_lm.files import sha256_file, write_rows
from tost_lm.inference.evaluated import write_result_file
from tost_lm.interop.card import model_card
from tost_lm.interop.hf import export
from tost_lm.pretrain.settings import PretrainConfig

pytestmark = pytest.mark.quick

SHA256 = "a" * 64


@pytest.fixture
def make_run(make_export: Callable[..., Path], tokenizer: Tokenizer, tmp_path: Path) -> Callable[..., Path]:
    """Writes the folder of a run of 8 steps with a checkpoint after the fourth; `sections` change its settings."""

    def make(pattern: str = "DA", **sections: dict[str, Any]) -> Path:
        model = tost_lm.load(make_export(pattern=pattern, positions="none", tssa={"denom_bias": "head"}))
        train = {"steps": 8, "global_batch_size": 4, "micro_batch_size": 1, "seq_len": 16, "dtype": "bfloat16"}
        tree = {
            "model": model.config.model_dump(mode="json"),
            "data": {"folder": "data/shards"},
            "optim": {"lr": 1e-2, "min_lr": 1e-3, "warmup_steps": 2},
            "parallel": {"sequence": 2, "zero_stage": 2},
            "run": {"name": "tiny"},
            **sections,
            "train": train | sections.get("train", {}),
        }
        config, run = validate(PretrainConfig, tree, "test"), tmp_path / "runs/tiny"

        def write_training(folder: Path) -> None:
            (folder / "config.toml").write_text(to_toml(config))
            Progress(4, 3, tokenizer_sha256=tokenizer.sha256, stages=(recorded(config),)).write(folder)

        write_checkpoint(step_folder(run, 4), model.config, model.state_dict(), tokenizer, write_training)
        (run / "config.toml").write_text(to_toml(config))
        environment = {
            "tost_lm": "0.1.0", "commit": "0123abcd-dirty", "python": "3.11.7", "device": "cuda", "world_size": 8,
            "packages": {"torch": "2.11.0", "wandb": None}, "command": ["tost", "train", "hub.token=planted"],
        }  # fmt: skip
        (run / "env.json").write_text(json.dumps(environment))
        return run

    return make


def write_measurements(run: Path) -> None:
    """Validations and evaluations: of the checkpoint, and of others."""
    measured = {"tokens": 1234, "position_ends": [], "loss_by_position": []}
    write_rows(run / "validation.jsonl", [{"step": n, "loss": 5.0 - n / 4, **measured} for n in (2, 4, 6)])
    evaluated = {"headline": "accuracy", "data_sha256": SHA256, "accuracy_standard_error": 0.01}
    names = {4: ("lambada@one", "lambada@two"), 6: ("lambada@one",)}
    rows = [{"step": n, "protocol": name, "accuracy": n / 10, **evaluated} for n in names for name in names[n]]
    write_rows(run / "evaluations.jsonl", rows)
    manifest_sha256 = sha256_file(step_folder(run, 4) / "manifest.json")
    for name, checkpoint_sha256 in (("lambada@two", manifest_sha256), ("wikitext2@two", SHA256)):
        identity = {
            "checkpoint_sha256": checkpoint_sha256, "tost_lm": "0.1.0", "shards": None,
            "data_sha256": SHA256,
            "settings": {"lambada": {"limit": 50, "file": None}, "hub": {"token": "planted or not"}},
        }  # fmt: skip
        totals = {"accuracy": 0.25, "accuracy_standard_error": 0.0625, "examples": 48}
        results = {"protocol": name, "identity": identity, "headline": "accuracy", "model": totals}
        write_result_file(run / "eval" / name / "results.json", results)
    for name, score in (("needle@keys", 1.0), ("records@numbers", 0.9)):
        identity = {"checkpoint_sha256": manifest_sha256}
        cells = [{"length": n, "samples": 50, "found_share": score} for n in (128, 256)]
        results = {"protocol": name, "identity": identity, "cells": cells, "threshold": 0.9}
        write_result_file(run / "eval" / name / "results.json", results | {"effective_length": {"tokens": 256}})


def rows_of(card: str, section: str) -> dict[str, list[str]]:
    """The cells after the first of each row in a section, by the first two cells (one in a table of properties)."""
    found = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", card, re.MULTILINE | re.DOTALL)
    lines = found[1].replace("\\", "").splitlines() if found else []
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    width = 1 if section != "Results" else 2
    return {" ".join(row[:width]): row[width:] for row in cells[2:]}


def run_usage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that the code of a folder's card defines, run in the folder."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 4
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec(code, names)
    return names


def test_a_card_states_the_record_of_the_run(make_run: Callable[..., Path], tmp_path: Path, tokenizer: Tokenizer):
    run = make_run()
    write_measurements(run)
    export(run, tmp_path / "tiny-hf")
    text = (tmp_path / "tiny-hf/README.md").read_text()
    card = ModelCard(text)
    assert card.data.to_dict() == {
        "library_name": "tost_lm",
        "pipeline_tag": "text-generation",
        "tags": ["tost_lm", "gated-delta-rule", "softmax-attention"],
    }
    assert card.text.startswith("\n# tiny-hf\n")
    model = rows_of(text, "Model")
    count = tost_lm.load(run).parameter_count()
    assert model["layers"] == ["pattern DA: D gated delta rule, linear in time, A softmax attention"]
    assert model["parameters"] == [f"{count:,} without learned positions"]
    assert (model["trained context"], model["longest input"]) == (["16 tokens"], ["unlimited"])
    assert model["tokenizer"] == [f"tokenizer.model, SHA-256 {tokenizer.sha256}"]
    training = rows_of(text, "Training")
    assert training == {
        "run": ["tiny"],
        "steps": ["4 of 8, 3 applied by the optimizer"],
        "training tokens": ["256"],
        "optimizer": ["AdamW, betas 0.9 and 0.95, weight decay 0.1, gradient clipping 1.0"],
        "precision": ["bfloat16; statistics, losses and optimizer state float32"],
        "seed": ["0"],
        "start": ["weights drawn at random"],
        "stage start": [
            "4 of 8 steps of 4 sequences of 16 tokens, concatenated, cosine, learning rate 0.01 to 0.001, "
            "2 warm-up steps; 100.0% data/shards"
        ],
        "data 1": [f"data/shards: 1,000 tokens, read 0.256 times, SHA-256 {FINGERPRINT}"],
        "device": ["cuda"],
        "parallel layout": ["tensor 1 × sequence 2 × data 4, ZeRO stage 2"],
        "versions": ["tost_lm 0.1.0, Python 3.11.7, torch 2.11.0"],
        "commit of tost_lm": ["0123abcd-dirty"],
    }
    of_step_4 = f"during training, step 4, test set SHA-256 {SHA256}"
    assert rows_of(text, "Results") == {
        "retrieval effective length": [
            "256 tokens (< 128 to 256)",
            "mean score of needle@keys, records@numbers at least 90.0%, tested at 128, 256; in parentheses the 95 % "
            "interval over 100 texts of each length",
        ],
        "validation nats per token": ["4.0000", "1,234 held-out tokens, step 4"],
        "validation perplexity": ["54.60", "1,234 held-out tokens, step 4"],
        "lambada@one accuracy": ["40.00% ± 1.00%", of_step_4],
        "lambada@two accuracy": [
            "25.00% (14.92% to 38.78%)",
            f"48 examples, test set SHA-256 {SHA256}, lambada.limit=50, hub.token=[redacted], tost_lm 0.1.0",
        ],
    }
    assert f"- There are {256 / count:.2g} training tokens per parameter." in text


def test_a_card_of_version_0_1_0_that_offloaded_all_has_its_layout(make_run: Callable[..., Path]):
    run = make_run(parallel={"sequence": 2, "zero_stage": 3, "offload": "optimizer"})
    settings = step_folder(run, 4) / "config.toml"
    settings.write_text(settings.read_text().replace('offload = "optimizer"', 'offload = "all"'))
    card = model_card(step_folder(run, 4), run=run)
    assert rows_of(card, "Training")["parallel layout"] == ["tensor 1 × sequence 2 × data 4, ZeRO stage 3"]


def test_what_was_not_recorded_is_not_stated(make_run: Callable[..., Path], make_export: Callable[..., Path]):
    run = make_run()
    card = model_card(step_folder(run, 4), run=run)
    assert "\n# tiny, step 4\n" in card
    assert "## Results" not in card
    assert "- No loss on held-out text was measured during training." in card
    alone = model_card(step_folder(run, 4))
    assert rows_of(card, "Training").keys() - rows_of(alone, "Training").keys() == {
        "device", "parallel layout", "versions", "commit of tost_lm",
    }  # fmt: skip
    card = model_card(make_export(pattern="T"), "other")
    assert re.findall("(?m)^#+ (.*)", card) == ["other", "Model", "Usage", "Limits"]
    assert rows_of(card, "Model")["longest input"] == ["16 tokens"]
    assert "license:" not in card
    assert "language:" not in card


def test_branches_mixtures_and_initial_weights(make_run: Callable[..., Path]):
    trunk = "runs/trunk/checkpoints/step_00000003"
    run = make_run(train={"branch_from": trunk}, data={"mixture": {"data/b": 3, "data/a": 1}})
    origin = {"folder": trunk, "data": "continued", "manifest_sha256": SHA256}
    write_rows(run / "events.jsonl", [{"event": "branched", "step": 3, **origin}])
    rows = rows_of(model_card(step_folder(run, 4), run=run), "Training")
    assert rows["start"] == [f"branch of {trunk}; manifest SHA-256 {SHA256}"]
    assert rows["stage start"][0].endswith("; 75.0% data/b, 25.0% data/a")


def test_secrets_are_redacted(make_run: Callable[..., Path], tmp_path: Path):
    secret = {"folder": "mnt/https:/user:planted@host/shards"}
    run = make_run(data=secret, train={"initial_weights": "models/token=planted"})
    write_measurements(run)
    export(run, tmp_path / "hf")
    card = (tmp_path / "hf/README.md").read_text()
    assert "planted" not in card
    assert rows_of(card, "Training")["start"] == ["weights of models/token=[redacted], with a new optimizer"]


def test_the_code_of_a_card_runs_where_the_card_lies(
    make_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tokens = torch.arange(12)[None]
    run = make_run()
    expected = tost_lm.load(run)(tokens).logits
    export(run, tmp_path / "hf")
    step = step_folder(run, 4)
    (step / "README.md").write_text(model_card(step, run=run))
    for folder in (step, tmp_path / "hf"):
        names = run_usage(folder, monkeypatch)
        assert torch.equal(names["model"](tokens).logits, expected)
        assert "lines" in names["tokenizer"].decode(names["tokenizer"].encode("The lines of this page"))
        assert "in a checkout of tost_lm" in (folder / "README.md").read_text()


def test_a_card_may_be_edited_and_other_files_not(make_run: Callable[..., Path], tmp_path: Path):
    export(make_run(), tmp_path / "hf")
    with (tmp_path / "hf/README.md").open("a") as card:
        card.write("More about this model.\n")
    verify_checkpoint(tmp_path / "hf")
    (tmp_path / "hf/config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"config\.json: damaged"):
        verify_checkpoint(tmp_path / "hf")
