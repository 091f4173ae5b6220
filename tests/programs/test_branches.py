"""Schedules and branches as a user runs them: a resumed, lengthened or branched run is one that never stopped."""

import shutil
from pathlib import Path

import pytest
from programs import curve, linked, refusal, run, snapshot, weights, write_corpus

from tost_lm.files import read_rows

CONSTANT = ["optim.schedule=constant", "train.steps=4"]
WSD = ["optim.schedule=wsd", "optim.decay_steps=4", "train.steps=8"]
MUON = ["optim.kind=muon", "parallel.zero_stage=0"]
TRUNK = "runs/trunk/checkpoints/step_00000004"


def train(workplace: Path, name: str, *words: str, ranks: int = 0) -> str:
    settings = ["run.toml", f"run.name={name}", "checkpoint.interval=2", *words]
    return run("tost train", *settings, cwd=workplace, ranks=ranks)


def refused(workplace: Path, name: str, *words: str) -> str:
    before = snapshot(workplace / "runs")
    error = refusal("tost train", "run.toml", f"run.name={name}", *words, cwd=workplace)
    assert snapshot(workplace / "runs") == before
    return error


@pytest.fixture(scope="module")
def trained(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs `trunk`, 4 steps at a constant rate, and `whole`, 8 steps of which the last 4 decay."""
    folder = linked(prepared, tmp_path_factory.mktemp("trained"))
    train(folder, "trunk", *CONSTANT)
    train(folder, "whole", *WSD, "validation.interval=4")
    return folder


@pytest.fixture
def place(trained: Path, tmp_path: Path) -> Path:
    """A copy of `trained` to work in."""
    return shutil.copytree(trained, tmp_path / "place", symlinks=True)


@pytest.mark.quick
def test_a_branch_is_a_run_that_never_stopped(place: Path):
    branch = [*WSD, f"train.branch_from={TRUNK}"]
    assert f"branching from {TRUNK}, data continued" in train(place, "branch", *branch, "run.stop_at_step=6")
    assert "resuming from runs/branch/checkpoints/step_00000006" in train(place, "branch", *branch)
    assert curve(place, "trunk") + curve(place, "branch") == curve(place, "whole")
    assert weights(place, "branch") == weights(place, "whole")
    (event,) = (row for row in read_rows(place / "runs/branch/events.jsonl") if row["event"] == "branched")
    assert (event["step"], event["folder"], event["data"]) == (4, TRUNK, "continued")
    assert len(event["manifest_sha256"]) == 64


@pytest.mark.slow
def test_a_source_goes_on_in_the_mixture_of_a_branch(place: Path):
    write_corpus(place / "other.jsonl", documents=20, words=200)
    (place / "other.toml").write_text(
        '[corpus]\nsource = "other.jsonl"\n[tokenizer]\npath = "out/tokenizer.model"\n[shards]\nfolder = "other"\n'
    )
    run("tost prepare shards", "other.toml", cwd=place)
    data = 'data={mixture = {"other" = 3, "out/shards" = 1}}'
    branch = [*WSD, data, f"train.branch_from={TRUNK}"]
    assert f"branching from {TRUNK}, data changed" in train(place, "mixed", *branch)
    train(place, "stopped", *branch, "run.stop_at_step=6")
    train(place, "stopped", *branch)
    assert curve(place, "stopped") == curve(place, "mixed")
    assert weights(place, "stopped") == weights(place, "mixed")
    # A branch of the branch continues with its data.
    branch = [*WSD, data, "train.branch_from=runs/stopped/checkpoints/step_00000006"]
    assert "data continued" in train(place, "continued", *branch, "optim.decay_steps=1")


def test_a_constant_run_is_lengthened_in_place(place: Path):
    train(place, "trunk", "optim.schedule=constant", "train.steps=6")
    train(place, "constant", "optim.schedule=constant", "train.steps=6")
    assert curve(place, "trunk") == curve(place, "constant")
    assert weights(place, "trunk") == weights(place, "constant")
    error = refused(place, "trunk", "optim.schedule=constant", "train.steps=5")
    assert error == (
        "runs/trunk: train.steps: 6 → 5: optim.schedule constant would end before step 6 of the checkpoint, or have "
        "other learning rates up to it; undo the change, or make the change one more stage: [[stages]] with "
        "from_step = 6"
    )


def test_wsd_is_lengthened_before_its_decay_and_branched_after_it(place: Path):
    wsd = ["optim.schedule=wsd", "optim.decay_steps=4"]
    train(place, "short", *wsd, "train.steps=6", "run.stop_at_step=2")
    train(place, "short", *wsd, "train.steps=8")
    assert curve(place, "short") == curve(place, "whole")
    assert weights(place, "short") == weights(place, "whole")
    assert refused(place, "whole", *wsd, "train.steps=12") == (
        "runs/whole: train.steps: 8 → 12: optim.schedule wsd would end before step 8 of the checkpoint, or have other "
        "learning rates up to it; undo the change, or make the change one more stage: [[stages]] with from_step = 8"
    )
    (place / "runs/whole/checkpoints/step_00000006").rename(place / "copied")
    train(place, "new", *wsd, "train.steps=12", "train.branch_from=copied")
    assert [row[3] for row in curve(place, "new")[:2]] == [1e-2] * 2  # its schedule counts its own steps


def test_what_a_branch_may_not_change_is_named(place: Path):
    branch = [*WSD, f"train.branch_from={TRUNK}"]
    for words, problem in (
        (
            ["train.branch_from=runs/trunk"],
            f"runs/trunk: is a run folder; name the checkpoint to branch from, such as {TRUNK}",
        ),
        (
            ["train.branch_from=nowhere"],
            "train.branch_from nowhere: no such folder; give the step folder to branch from",
        ),
        (
            ["train.initial_weights=x"],
            "train.branch_from and train.initial_weights exclude each other: set one of them",
        ),
        (["train.steps=4", "optim.decay_steps=1"], "is after step 4, and train.steps is 4; set more steps"),
        (["model.width=32"], "\nmodel.width: 16 → 32"),
        (MUON, 'stage branch: has the state of another optimizer; set optim.kind = "adamw"'),
    ):
        assert refused(place, "new", *branch, *words).endswith(problem)
