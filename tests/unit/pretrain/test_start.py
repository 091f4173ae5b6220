"""A run folder may be taken for the same run, another one, or none."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
from hand_made import hand_made
from hf_tokenizers import byte_level, made
from logged_run import settings_of as settings_of_run

from tost_lm.checkpointing.format import Progress, write_checkpoint
from tost_lm.checkpointing.run_folder import FLIGHT_RECORDER, step_folder
from tost_lm.config import validate
from tost_lm.data.loader import Corpora
from tost_lm.errors import CheckpointError, ConfigError
from tost_lm.model import TostLM
from tost_lm.pretrain.changes import changes, record_of
from tost_lm.pretrain.metrics import write_run_folder
from tost_lm.pretrain.settings import PretrainConfig, Stage
from tost_lm.pretrain.start import find_start, require_same_checkpoints

TOKENIZER = made(byte_level())
SETTINGS = settings_of_run() | {"train": {"steps": 9, "global_batch_size": 12, "micro_batch_size": 2, "seq_len": 8}}


def config(**sections: dict[str, Any]) -> PretrainConfig:
    tree = {name: {**SETTINGS.get(name, {}), **sections.get(name, {})} for name in {**SETTINGS, **sections}}
    return validate(PretrainConfig, tree, "test")


@pytest.fixture(autouse=True)
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder with checkpoints after 3 and 6 steps on the shards in `shards`; `other` has others."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Corpora, "open", shards)
    write_run(config())
    return Path("runs/r")


def shards(folders: Mapping[Path, float]) -> Corpora:
    """Shards whose documents depend on the name of their folder."""
    (folder,) = folders
    written = hand_made(Path(tempfile.mkdtemp(dir=".")), [30, 40 + len(folder.name)], tokenizer="abc")
    (written.folder / TOKENIZER.file_name).write_bytes(TOKENIZER.model_bytes)
    return Corpora([written], [1.0])


def first_stage(**changes: Any) -> Stage:
    return config(**changes).in_stages()[0]


def write_run(config: PretrainConfig, name: str = "r") -> None:
    write_run_folder(config, world_size=1, device="cpu", planned={})
    stage = config.in_stages()[0]
    record = record_of(stage, shards(config.data.folders), stage)
    for steps in (3, 6):
        model = TostLM(config.model)
        write_checkpoint(
            step_folder(Path("runs") / name, steps), config.model, model.state_dict(), TOKENIZER,
            Progress(steps, steps, tokenizer_sha256=TOKENIZER.sha256, stages=(record,)).write,
        )  # fmt: skip


def test_the_same_run_goes_on_from_its_newest_checkpoint(run: Path):
    start = find_start(config(run={"log_interval": 3, "stop_at_step": 7}))
    assert start.resume_from == step_folder(run, 6)
    assert start.checkpoints == (step_folder(run, 3), step_folder(run, 6))


def test_what_another_launch_saved_meanwhile_ends_this_one(run: Path):
    start = find_start(config())
    require_same_checkpoints(start)
    step_folder(run, 6).rename(step_folder(run, 8))
    with pytest.raises(ConfigError, match="another launch has changed its checkpoints; run the command again"):
        require_same_checkpoints(start)


def test_a_renamed_folder_is_still_the_same_run(run: Path):
    run.rename("runs/s")
    assert find_start(config(run={"name": "s"})).resume_from == step_folder(Path("runs/s"), 6)


def test_a_first_launch_that_ended_early_may_leave_a_lock_and_flight_records():
    (Path("runs/early") / FLIGHT_RECORDER).mkdir(parents=True)
    Path("runs/early/.lock").touch()
    early = config(run={"name": "early"})
    assert find_start(early).weights_from is None
    Path("runs/early/thesis.txt").touch()
    with pytest.raises(ConfigError, match="is not a run folder"):
        find_start(early)


def test_the_work_may_be_shared_out_in_another_way(run: Path):
    other = config(parallel={"zero_stage": 2}, train={"micro_batch_size": 3})
    assert find_start(other).resume_from == step_folder(run, 6)


def test_other_settings_and_other_shards_are_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(
        ConfigError,
        match=r"(?s)other settings.*\nmodel\.bias: false → true\noptim\.warmup_steps: 0 → 1\ntrain\.steps: 9 → 10",
    ):
        find_start(config(train={"steps": 10}, model={"bias": True}))
    monkeypatch.setattr(Corpora, "open", lambda folders: shards({Path("of other documents"): 1.0}))
    with pytest.raises(CheckpointError, match="was trained on other shards"):
        find_start(config())


def test_a_setting_that_an_earlier_version_lacked_had_its_default():
    recorded = first_stage().what_is_trained()
    del recorded["model"]["init_std"], recorded["optim"]["lr"]
    assert changes(recorded, first_stage(), 6) == []
    assert changes(recorded, first_stage(model={"init_std": 0.05}), 6) == ["model.init_std: 0.02 → 0.05"]


def test_a_setting_that_an_earlier_version_had_beside_what_is_trained_changes_nothing():
    recorded = first_stage().what_is_trained()
    recorded |= {"memory": {"every": 1}, "stages": []}
    assert changes(recorded, first_stage(), 6) == []
    recorded["model"]["every"] = 1
    assert changes(recorded, first_stage(), 6) == ["model.every: 1 → not set"]


def test_a_checkpoint_of_another_run_is_refused(run: Path):
    """Copied into the run folder, with the same model and shards."""
    write_run(config(run={"name": "s"}, train={"seed": 5}, optim={"lr": 0.5}), "s")
    rmtree(step_folder(run, 6))
    step_folder(Path("runs/s"), 6).rename(step_folder(run, 6))
    with pytest.raises(ConfigError) as caught:
        find_start(config())
    assert str(caught.value).splitlines()[1:] == ["optim.lr: 0.5 → 0.0006", "train.seed: 5 → 0"]


@pytest.mark.parametrize(
    ("recorded", "steps", "problem"),
    [
        ({"schedule": "constant"}, 6, ""),
        ({"schedule": "constant"}, 90, ""),
        ({"schedule": "constant"}, 5, "constant would end before step 6 of the checkpoint"),
        ({"schedule": "wsd", "decay_steps": 3}, 90, ""),
        ({"schedule": "wsd", "decay_steps": 3}, 8, "other learning rates .*; undo the change, or .*from_step = 6"),
        ({"schedule": "wsd", "decay_steps": 4}, 90, "wsd would .*other learning rates"),
        ({"schedule": "linear"}, 90, "linear would .*other learning rates"),
        ({}, 90, "cosine would .*other learning rates"),
    ],
)
def test_a_run_may_have_other_steps_if_its_learning_rates_so_far_stay(
    run: Path, recorded: dict[str, Any], steps: int, problem: str
):
    optim = {"warmup_steps": 0, **recorded}
    rmtree(run)
    write_run(config(optim=optim))
    other = config(optim=optim, train={"steps": steps})
    if problem:
        with pytest.raises(ConfigError, match=rf"^runs/r: train.steps: 9 → {steps}: .*{problem}"):
            find_start(other)
    else:
        assert find_start(other).resume_from == step_folder(run, 6)


def test_a_longer_run_keeps_its_warm_up(run: Path):
    constant: dict[str, Any] = {"schedule": "constant"}
    rmtree(run)
    write_run(config(optim=constant))
    with pytest.raises(ConfigError, match=r"other learning rates up to it; set optim\.warmup_steps=0$"):
        find_start(config(optim=constant, train={"steps": 20}))
    constant["warmup_steps"] = 0
    longer = config(optim=constant, train={"steps": 20})
    assert find_start(longer).resume_from == step_folder(run, 6)


def test_what_is_no_run_is_refused(run: Path):
    (run / "config.toml").unlink()
    with pytest.raises(ConfigError, match="not a run folder"):
        find_start(config())
    Path("runs/file").touch()
    with pytest.raises(ConfigError, match="not a run folder"):
        find_start(config(run={"name": "file"}))


def test_the_batch_must_be_shared_out_evenly():
    assert [config().accumulation(world) for world in (1, 2, 3, 6)] == [6, 3, 2, 1]
    with pytest.raises(ConfigError, match=r"12 is not divisible by 4 data ranks × train\.micro_batch_size 2 = 8"):
        config().accumulation(4)
