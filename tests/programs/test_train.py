"""`tost train` as a user runs it: stop and resume, a second launch, damaged checkpoints, and mistakes."""

import json
import shutil
from pathlib import Path

import pytest
from programs import curve, linked, refusal, run, snapshot

import tost_lm
from tost_lm.config import load_config
from tost_lm.files import read_rows
from tost_lm.model.flops import parameters
from tost_lm.pretrain.settings import PretrainConfig
from tost_lm.testing import FLOAT32_REORDERED


@pytest.fixture(scope="module")
def never_stopped(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = linked(prepared, tmp_path_factory.mktemp("never_stopped"))
    run("tost train", "run.toml", cwd=folder, ranks=2, WANDB_MODE="offline")
    return folder


def test_a_run_leaves_what_the_readme_says(never_stopped: Path):
    folder = never_stopped / "runs/tiny"
    assert {path.name for path in folder.iterdir()} == {
        "config.toml", "env.json", "log.txt", "metrics.jsonl", "validation.jsonl", "evaluations.jsonl",
        "events.jsonl", "heartbeats", "checkpoints", "wandb",
    }  # fmt: skip
    rows = read_rows(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert all({"loss", "lr", "grad_norm", "tokens", "tokens_per_second", "seconds"} < set(row) for row in rows)
    assert list((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    log = (folder / "log.txt").read_text()
    assert "step 12/12  loss" in log
    assert "tokens/s/device  " in log
    assert json.loads((folder / "env.json").read_text())["world_size"] == 2
    assert tost_lm.load(folder).parameter_count() > 0
    card = (folder / "checkpoints/step_00000012/README.md").read_text()
    assert "\n# tiny, step 12\n" in card
    assert "| steps | 12 of 12, 12 applied by the optimizer |\n| training tokens | 3,072 |\n" in card
    assert "| parallel layout | tensor 1 × sequence 1 × data 2, ZeRO stage 1 |" in card
    assert "## Results" not in card


def test_without_a_home_wandb_is_left_out_with_a_warning(workplace: Path):
    said = run("no_home", "train", "run.toml", "train.steps=2", cwd=workplace, WANDB_MODE="offline")
    assert "wandb failed (Could not determine home directory); metrics.jsonl continues" in said
    assert [step for step, *_ in curve(workplace)] == [1, 2]


def test_a_validation_is_one_pass_over_the_held_out_split_at_most(workplace: Path):
    words = ["run.toml", "run.name=valid", "train.steps=2", "validation.interval=2", "validation.sequences=100000"]
    output = run("tost train", *words, cwd=workplace)
    assert "validation.sequences 100,000 is more than one pass over the held-out split: using its " in output
    (row,) = read_rows(workplace / "runs/valid/validation.jsonl")
    manifest = json.loads((workplace / "out/shards/manifest.json").read_text())
    assert row["tokens"] == manifest["splits"]["valid"]["tokens"]


def test_without_a_launcher_one_process_trains_and_keeps_the_newest_checkpoints(workplace: Path, never_stopped: Path):
    config = load_config(PretrainConfig, workplace / "run.toml")
    words = ["run.toml", "run.name=alone", "checkpoint.interval=3", "checkpoint.keep_latest_k=2", "run.log_interval=4",
             "run.profile_steps=[10, 11]"]  # fmt: skip
    said = run("tost train", *words, cwd=workplace)
    assert f"{parameters(config.model).total / 1e6:.2f}M parameters, 1 rank on cpu" in said
    assert [path.name for path in sorted((workplace / "runs/alone/checkpoints").iterdir())] == [
        "step_00000009", "step_00000012",
    ]  # fmt: skip
    assert [path.name for path in (workplace / "runs/alone/profile").iterdir()] == ["rank_00000_steps_10-11.json.gz"]
    expected = {step: loss for step, loss, *_ in curve(never_stopped, "tiny")}
    for step, loss, *_ in curve(workplace, "alone"):
        assert loss == pytest.approx(expected[step], rel=FLOAT32_REORDERED)
    before = snapshot(workplace / "runs")
    assert "reusing runs/alone/checkpoints/step_00000012" in run("tost train", *words, cwd=workplace)
    assert snapshot(workplace / "runs") == before
    said = refusal("tost train", *words, "optim.lr=2e-2", "train.seed=1", cwd=workplace)
    assert said.splitlines()[1:] == ["optim.lr: 0.01 → 0.02", "train.seed: 0 → 1"]
    assert snapshot(workplace / "runs") == before


def test_a_damaged_newer_checkpoint_does_not_push_out_a_good_one(workplace: Path):
    checkpoints = workplace / "runs/tiny/checkpoints"
    run("tost train", "run.toml", "run.stop_at_step=8", cwd=workplace)
    (checkpoints / "step_00000008/model.json").write_text("{}")
    (checkpoints / ".step_00000009.tmp").mkdir()
    run("tost train", "run.toml", "checkpoint.keep_latest_k=1", "run.stop_at_step=6", cwd=workplace)
    assert [folder.name for folder in sorted(checkpoints.iterdir())] == ["step_00000006", "step_00000008"]
    run("tost train", "run.toml", "checkpoint.keep_latest_k=1", "run.stop_at_step=8", cwd=workplace)
    assert [folder.name for folder in sorted(checkpoints.iterdir())] == ["step_00000008"]
    before = snapshot(workplace / "runs")
    assert "train.seed: 0 → 3" in refusal("tost train", "run.toml", "train.seed=3", cwd=workplace)
    assert snapshot(workplace / "runs") == before


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("optim.weigth_decay=0.1", "optim.weigth_decay: unknown key (did you mean optim.weight_decay?)"),
        ("model.vocab_size=300", "model.vocab_size 300 is smaller than the tokenizer's 384 pieces"),
        ("data.folder=nowhere", "nowhere: not a shard folder; build one with tost prepare shards"),
        ("data.folder=data/embedded/shards", "build one with tost prepare tokenizer embedded, then tost"),
        ("run.device=cuda", "no GPU for local rank 0: this node has 0 GPUs"),
        ("parallel.tensor=3", "model.heads 2 is not divisible by parallel.tensor 3"),
        ("launch.ranks=3", "train.global_batch_size 4 is not divisible by 3 data ranks"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(workplace: Path, override: str, problem: str):
    said = refusal("tost train", "run.toml", override, cwd=workplace)
    assert problem in said
    assert "\n" not in said
    assert not (workplace / "runs").exists()


def test_shards_that_are_damaged_are_refused(workplace: Path):
    shutil.copytree(workplace / "out/shards", workplace / "mine")
    shard = workplace / "mine/train_00000.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert "train_00000.bin: damaged, " in refusal("tost train", "run.toml", "data.folder=mine", cwd=workplace)
    assert not (workplace / "runs").exists()
