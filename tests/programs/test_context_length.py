"""Every program evaluates and describes a model at the length that it was trained on, without any setting."""

import shutil
from pathlib import Path

import pytest
from programs import linked, refusal, results, run

import tost_lm
from tost_lm.ops.rotary import Rotary

TRAINED = 96
MODEL = [
    "model.pattern=TA", "model.tssa.denom_bias=head", "model.softmax.window=16", "model.positions=none",
    f"train.seq_len={TRAINED}", "train.steps=2", "checkpoint.interval=2", "run.name=longer",
]  # fmt: skip


@pytest.fixture(scope="module")
def longer(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run whose sequences are longer than model.max_positions, which its model does not need."""
    folder = linked(prepared, tmp_path_factory.mktemp("longer"))
    run("tost train", "run.toml", *MODEL, cwd=folder)
    return folder


def test_held_out_text_is_scored_in_windows_of_it(longer: Path):
    run("tost eval", "runs/longer", "heldout", cwd=longer)
    whole = results(longer / "runs/longer", "heldout@bpb")
    assert whole["window_tokens"] == TRAINED
    run("tost eval", "runs/longer", "heldout", "zero_shot.window_tokens=8", cwd=longer)
    short = results(longer / "runs/longer", "heldout@bpb")
    assert short["window_tokens"] == 8
    assert short["model"]["nats"] != whole["model"]["nats"]


def test_retrieval_tasks_have_it(longer: Path):
    run("tost eval", "runs/longer", "needle", "needle.samples=1", "needle.depths=[0.5]", "needle.keys=1", cwd=longer)
    assert max(cell["length"] for cell in results(longer / "runs/longer", "needle@keys")["cells"]) == TRAINED


def test_the_loss_by_position_goes_beyond_it(longer: Path):
    run("tost eval", "runs/longer", "positions", cwd=longer)
    found = results(longer / "runs/longer", "positions")
    assert found["trained_tokens"] == TRAINED
    assert found["by_position"][-1]["end"] == 16 * TRAINED
    assert [row["end"] for row in found["by_position"] if row["trained"]][-1] == TRAINED


def test_harness_export_and_card_have_it(longer: Path):
    from transformers import AutoConfig

    from tost_lm.eval.lm_eval import HarnessModel
    from tost_lm.interop.hf import export

    assert HarnessModel(pretrained=str(longer / "runs/longer")).max_length == TRAINED
    assert HarnessModel(pretrained=str(longer / "runs/longer"), max_length=9, tokenizer="gpt2").max_length == 9
    export(longer / "runs/longer", longer / "export")
    assert AutoConfig.from_pretrained(longer / "export").max_position_embeddings == TRAINED
    for folder in (longer / "runs/longer/checkpoints/step_00000002", longer / "export"):
        assert f"| trained context | {TRAINED} tokens |" in (folder / "README.md").read_text()


def test_it_is_the_longest_of_all_phases_of_training(longer: Path):
    again = ["run.name=second", "train.seq_len=32", "train.initial_weights=runs/longer", "run.stop_at_step=1"]
    run("tost train", "run.toml", *MODEL, *again, cwd=longer)
    run("tost train", "run.toml", *MODEL, *again[:-1], cwd=longer)
    steps = [tost_lm.load(longer / f"runs/second/checkpoints/step_0000000{step}") for step in (1, 2)]
    assert [model.config.context_length for model in steps] == [TRAINED, TRAINED]


def test_a_second_phase_may_have_another_rotary_embedding(longer: Path):
    again = ["run.name=base", "train.initial_weights=runs/longer", "model.softmax.rope_theta=500000"]
    scaled = ["model.softmax.rope_scaling=linear", "model.softmax.rope_scaling_factor=2"]
    printed = run("tost train", "run.toml", *MODEL, *again, *scaled, cwd=longer)
    assert "weights runs/longer: this run changes model.softmax.rope_theta: 10000.0 → 500000.0, " in printed
    assert tost_lm.load(longer / "runs/base").config.rotary == Rotary(8, 500000, "linear", 2)
    run("tost train", "run.toml", *MODEL, *again, "run.name=none", "model.softmax.rope_theta=0", cwd=longer)
    assert tost_lm.load(longer / "runs/none").config.rotary is None
    of_none = [*again[1:2], "run.name=other", "train.initial_weights=runs/none"]
    printed = refusal("tost train", "run.toml", *MODEL, *of_none, cwd=longer)
    assert printed.splitlines()[1:] == ["model.softmax.rope_theta: 0.0 → 10000.0"]


def test_a_second_phase_without_a_size_changes_the_model_of_the_weights_and_resumes_without_them(longer: Path):
    sections = (longer / "run.toml").read_text().split("\n[")
    phase = "\n[".join(part for part in sections if not part.lstrip("[\n").startswith("model"))
    (longer / "phase.toml").write_text(phase)
    shutil.copytree(longer / "runs/longer", longer / "runs/moved")
    words = ["phase.toml", *MODEL[4:6], "run.name=phase", "train.initial_weights=runs/moved", "checkpoint.interval=1"]
    words.append("model.softmax.rope_theta=2e4")
    run("tost train", *words, "run.stop_at_step=1", cwd=longer)
    shutil.rmtree(longer / "runs/moved")
    run("tost train", *words, cwd=longer)
    config = tost_lm.load(longer / "runs/phase").config
    assert (config.pattern, config.softmax.window, config.rotary) == ("TA", 16, Rotary(8, 2e4))
