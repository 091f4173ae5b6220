"""A run of several stages: each has its settings, all have one optimizer, one folder and one command."""

import random
import shutil
import time
from pathlib import Path

import psutil
import pytest
from forked import Forked, free_port
from fresh_step import fresh_steps, state_of
from programs import curve, linked, refusal, run, snapshot, weights, write_corpus

from tost_lm.checkpointing.format import Progress, StoredTensors, read_model_config
from tost_lm.checkpointing.run_folder import step_folder
from tost_lm.files import read_rows
from tost_lm.ops.rotary import Rotary
from tost_lm.testing import FLOAT32_REORDERED, assert_as_accurate, run_on_ranks

STAGES = """
[[stages]]
name = "longer"
from_step = 4
train.seq_len = 128
train.global_batch_size = 2
optim.lr = 5e-3
data.mixture = { "out/shards" = 3, "other" = 1 }
{longer}
[[stages]]
name = "longest"
tokens = 1024
train.seq_len = 256
data.packing = "best-fit"
optim.warmup_steps = 1
memory.tile_tokens = 64
model.softmax = { rope_scaling = "yarn", rope_scaling_factor = 2.0, rope_original_length = 128 }
{longest}
"""
MODEL = ["model.positions=none", "model.pattern=DA", "model.softmax.rope_theta=1e4"]


def write_recipe(folder: Path, name: str, longer: str = "", longest: str = "") -> None:
    stages = STAGES.replace("{longer}", longer).replace("{longest}", longest)
    text = (folder / "run.toml").read_text() + stages
    (folder / name).write_text(text.replace("interval = 4", "interval = 2").replace("steps = 12", "steps = 8"))


@pytest.fixture(scope="module")
def place(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shard folders, and recipes of three stages."""
    folder = linked(prepared, tmp_path_factory.mktemp("stages"))
    write_corpus(folder / "other.jsonl", documents=20, words=200)
    (folder / "other.toml").write_text(
        '[corpus]\nsource = "other.jsonl"\n[tokenizer]\npath = "out/tokenizer.model"\n[shards]\nfolder = "other"\n'
    )
    run("tost prepare shards", "other.toml", cwd=folder)
    write_recipe(folder, "stages.toml")
    write_recipe(folder, "layouts.toml", "parallel.tensor = 2", "parallel.tensor = 1\nparallel.sequence = 2")
    return folder


@pytest.fixture(scope="module")
def whole(place: Path) -> None:
    train(place, "whole")


def train(folder: Path, name: str, *words: str, recipe: str = "stages.toml") -> str:
    return run("tost train", recipe, f"run.name={name}", *MODEL, *words, cwd=folder)


def train_until(folder: Path, name: str, *steps: int) -> None:
    """Stop after each of these steps. If it is the end of a stage, the next one needs no fresh interpreter."""
    for step in steps:
        train(folder, name, f"run.stop_at_step={step}")


def refused(folder: Path, name: str, *words: str, recipe: str = "stages.toml") -> str:
    before = snapshot(folder / "runs" / name)
    error = refusal("tost train", recipe, f"run.name={name}", *MODEL, *words, cwd=folder)
    assert snapshot(folder / "runs" / name) == before
    return error


@pytest.mark.usefixtures("whole")
def test_one_command_trains_all_stages(place: Path):
    steps = curve(place, "whole")
    assert [row[0] for row in steps] == [*range(1, 11)]
    assert [row[4] for row in steps] == [256 * n for n in range(1, 9)] + [2560, 3072]
    events = [row for row in read_rows(place / "runs/whole/events.jsonl") if row["event"] == "stage"]
    assert [(row["step"], row["name"]) for row in events] == [(4, "longer"), (8, "longest")]
    rates = [row[3] for row in steps]
    assert rates[4] == 5e-3  # no warm-up
    assert rates[8] == 2.5e-3  # a warm-up of one step
    assert rates[3] == pytest.approx(6e-5)  # each schedule ends with its stage
    assert rates[7] == pytest.approx(6e-5)
    progress = Progress.read(step_folder(place / "runs/whole", 10))
    assert [(stage.name, stage.first_step, stage.seq_len) for stage in progress.stages] == [
        ("start", 0, 64), ("longer", 4, 128), ("longest", 8, 256),
    ]  # fmt: skip
    models = [read_model_config(step_folder(place / "runs/whole", step)) for step in (8, 10)]
    assert [model.rotary for model in models] == [Rotary(8, 1e4), Rotary(8, 1e4, "yarn", 2.0, 128)]
    card = (step_folder(place / "runs/whole", 10) / "README.md").read_text()
    assert "A softmax attention with a rotary embedding scaled by 2 (yarn) |" in card
    assert "| trained context | 256 tokens |" in card
    assert (
        "| stage longer | 4 of 4 steps of 2 sequences of 128 tokens, concatenated, cosine, learning rate 0.005" in card
    )
    assert "reusing" in train(place, "whole")


@pytest.mark.usefixtures("whole")
def test_a_run_stopped_in_each_stage_is_the_unbroken_one(place: Path):
    train_until(place, "parts", 3, 4, 7, 8, 9)
    train(place, "parts")
    assert curve(place, "parts") == curve(place, "whole")
    assert weights(place, "parts") == weights(place, "whole")


@pytest.mark.usefixtures("whole")
def test_a_damaged_checkpoint_at_a_boundary_is_named(place: Path):
    """The newest valid checkpoint is in the stage before, which needs processes of its own."""
    train_until(place, "flipped", 4)
    damaged = next(step_folder(place / "runs/flipped", 4).glob("model*.safetensors"))
    octets = bytearray(damaged.read_bytes())
    octets[-1] ^= 1
    damaged.write_bytes(octets)
    error = refused(place, "flipped", "run.stop_at_step=5")
    assert error == (
        f"runs/flipped/checkpoints/step_00000004/{damaged.name}: damaged, its XXH3 hash differs from the manifest; "
        "delete the checkpoint or copy it again"
    )
    shutil.rmtree(damaged.parent)
    train(place, "flipped", "run.stop_at_step=5")
    assert curve(place, "flipped") == curve(place, "whole")[:5]


@pytest.mark.slow
@pytest.mark.usefixtures("whole")
def test_a_run_on_different_layouts_killed_ten_times_is_the_unbroken_one(place: Path):
    words, chance = [*MODEL, "launch.ranks=2", "parallel.zero_stage=2"], random.Random(0)
    train(place, "layouts", *words, recipe="layouts.toml")
    for _ in range(10):  # `finish` kills it
        Forked("tost train", "layouts.toml", "run.name=killed", *words, cwd=place).finish(chance.uniform(0.5, 16.0))
        while any("run.name=killed" in (one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"])):
            time.sleep(0.1)  # ranks end after their launcher
    train(place, "killed", *words, recipe="layouts.toml")
    assert curve(place, "killed") == curve(place, "layouts")
    assert weights(place, "killed") == weights(place, "layouts")
    for found, expected in zip(curve(place, "layouts"), curve(place, "whole"), strict=True):
        assert found == pytest.approx(expected, rel=256 * FLOAT32_REORDERED)


@pytest.mark.slow
def test_launchers_of_two_nodes_start_the_next_stage_together(place: Path):
    words, port = ["tost_lm.pretrain.commands.train", "stages.toml", "run.name=nodes", *MODEL], str(free_port())
    variables = {"NODES": "2", "RANKS_PER_NODE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    nodes = [
        Forked("tost_lm.parallel.launch", *words, cwd=place, **variables, NODE_RANK=str(number)) for number in range(2)
    ]
    for code, _, errors in [node.finish() for node in nodes]:
        assert code == 0, errors
    assert [row[0] for row in curve(place, "nodes")] == [*range(1, 11)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_boundary_keeps_moments_and_master_weights(place: Path, dtype: str):
    """A step with a rate of almost 0 leaves the weights, and decays the moments by their rates, on another layout."""
    name = f"kept-{dtype}"
    layout = 'parallel.tensor = 2\nparallel.zero_stage = 3\noptim.schedule = "constant"'
    write_recipe(place, "kept.toml", layout, "parallel.zero_stage = 1")
    words = [f"train.dtype={dtype}", "parallel.zero_stage=1", "launch.ranks=2", "optim.weight_decay=0.0"]
    text = (place / "kept.toml").read_text().replace("optim.lr = 5e-3", "optim.lr = 1e-30")
    (place / "kept.toml").write_text(text)
    train(place, name, *words, "run.stop_at_step=6", recipe="kept.toml")
    before, after = (StoredTensors(step_folder(place / "runs" / name, step), "model") for step in (4, 6))
    assert all(before[weight].equal(after[weight]) for weight in before)
    moments = [StoredTensors(step_folder(place / "runs" / name, step), "optimizer") for step in (4, 6)]
    squares = [key for key in moments[0] if key.startswith("exp_avg_sq/")]
    assert squares
    assert all(moments[0][key].norm() * 0.95**2 <= moments[1][key].norm() * 1.001 for key in squares)


def test_the_step_after_a_boundary_is_that_of_a_new_engine_with_the_same_state(place: Path):
    """After a change of rate, batch, length and mixture; to the bit, and as accurate as torch alone."""
    for step in (4, 5):
        train(place, "one", f"run.stop_at_step={step}", "checkpoint.interval=1")
    before, after = (step_folder(place / "runs/one", step) for step in (4, 5))
    text = (place / "run.toml").read_text().replace('folder = "out/shards"', 'mixture = {"out/shards" = 3, other = 1}')
    (place / "fresh.toml").write_text(text.replace("seq_len = 64", "seq_len = 128"))
    words = [*MODEL, "train.global_batch_size=2", "optim.lr=5e-3"]
    (found,) = run_on_ranks(fresh_steps, 1, place, "fresh.toml", words, before, after)
    trained = state_of(after)
    assert trained.keys() == found["engine"].keys() == found["float64"].keys()
    for name, tensor in trained.items():
        assert tensor.equal(found["engine"][name]), name
        assert_as_accurate(tensor, found["float32"][name], found["float64"][name], name)


@pytest.mark.usefixtures("whole")
def test_finished_stages_stay_and_later_ones_may_change(place: Path):
    train_until(place, "edited", 4, 6)
    write_recipe(place, "edited.toml", longest="optim.lr = 2e-3")
    train(place, "edited", "run.stop_at_step=8", recipe="edited.toml")
    train(place, "edited", recipe="edited.toml")
    assert curve(place, "edited")[:8] == curve(place, "whole")[:8]
    assert curve(place, "edited")[8][3] == 1e-3
    write_recipe(place, "edited.toml", longer="optim.beta1 = 0.8")
    error = refused(place, "whole", recipe="edited.toml")
    assert "stage longer has ended; undo the change, or branch from a checkpoint: run.name=NEW" in error.splitlines()[0]
    assert error.splitlines()[1] == "optim.beta1: 0.9 → 0.8"


def test_a_change_at_a_resume_is_one_more_stage(place: Path):
    words = ["train.steps=4", "optim.schedule=constant"]
    train(place, "changed", *words, "run.stop_at_step=2", recipe="run.toml")
    new = [*words, "optim.lr=1e-3", "train.seq_len=32", "train.global_batch_size=2"]
    error = refused(place, "changed", *new, recipe="run.toml")
    assert error.splitlines()[0].endswith("or make the change one more stage: [[stages]] with from_step = 2")
    assert error.splitlines()[1:] == [
        "optim.lr: 0.01 → 0.001", "train.global_batch_size: 4 → 2", "train.seq_len: 64 → 32",
    ]  # fmt: skip
    stage = "{name = 'shorter', from_step = 2, optim = {lr = 1e-3}, train = {seq_len = 32, global_batch_size = 2}}"
    new = [*words, f"stages=[{stage}]"]
    train(place, "changed", *new, "run.stop_at_step=3", recipe="run.toml")
    assert "resuming" in train(place, "changed", *new, recipe="run.toml")  # the same command, in the same stage
    assert [row[3:] for row in curve(place, "changed")] == [
        (pytest.approx(1e-2 / 3), 256), (pytest.approx(2e-2 / 3), 512), (1e-3, 576), (1e-3, 640),
    ]  # fmt: skip
    stages = Progress.read(step_folder(place / "runs/changed", 4)).stages
    assert [(stage.name, stage.first_step) for stage in stages] == [("start", 0), ("shorter", 2)]


def test_other_shards_in_the_same_folder_are_one_more_stage(place: Path):
    shutil.copytree(place / "other", place / "replaced")
    words = ["data.folder=replaced", "train.steps=4", "optim.schedule=constant", "optim.warmup_steps=0"]
    train(place, "replaced", *words, "run.stop_at_step=2", recipe="run.toml")
    shutil.rmtree(place / "replaced")
    shutil.copytree(place / "out/shards", place / "replaced")
    assert "was trained on other shards" in refused(place, "replaced", *words, recipe="run.toml")
    train(place, "replaced", *words, "stages=[{name = 'other', from_step = 2}]", recipe="run.toml")
    assert [stage.first_step for stage in Progress.read(step_folder(place / "runs/replaced", 4)).stages] == [0, 2]


@pytest.mark.quick
def test_a_run_whose_later_checkpoints_are_removed_skips_other_steps(place: Path):
    words = ["train.steps=6", "checkpoint.interval=2"]
    train(place, "spike", *words, "run.stop_at_step=5", recipe="run.toml")
    words.append("data.skip_steps=[[3, 4]]")
    error = refused(place, "spike", *words, recipe="run.toml")
    assert error.splitlines()[1] == "data.skip_steps: [] → [[3, 4]]"
    for step in (4, 5):
        shutil.rmtree(step_folder(place / "runs/spike", step))
    train(place, "spike", *words, "run.stop_at_step=4", recipe="run.toml")
    assert "resuming" in train(place, "spike", *words, recipe="run.toml")
    straight = ["train.steps=6", "data.skip_steps=[[3, 4]]"]
    train(place, "straight", *straight, recipe="run.toml")
    assert curve(place, "spike") == curve(place, "straight")
    assert [row[0] for row in curve(place, "spike")] == [1, 2, 5, 6]
    progress = Progress.read(step_folder(place / "runs/spike", 6))
    assert (progress.step, progress.updates) == (6, 4)
    skipped = [row for row in read_rows(place / "runs/spike/events.jsonl") if row["event"] == "skipped"]
    assert [(row["step"], row["why"], row["samples"]) for row in skipped] == [
        (3, "data.skip_steps", [8, 11]), (4, "data.skip_steps", [12, 15]),
    ]  # fmt: skip
    assert [stage.name for stage in progress.stages] == ["start"]


@pytest.mark.parametrize(
    ("stage", "problem"),
    [
        ("model.width = 32", "stage longer: a run keeps the shape of its model"),
        ("train.seed = 1", "stage longer: train.seed is one for the whole run; remove it here"),
        ('checkpoint.upload = "s3://b"', "stage longer: checkpoint.upload is one for the whole run; remove it here"),
        ('optim.kind = "muon"', "stage longer: optim.kind: another optimizer has another state"),
        ("train.steps = 4", "stage longer: it has no steps after step 4; set its tokens or a larger train.steps"),
        ("trian.steps = 4", "stages.trian: unknown key (did you mean stages.train?)"),
        ("train.sequence = 4", "stage longer: train.sequence: unknown key"),
        ('data.folder = "strange"', "stage longer: its tokenizer is not that of the shards in strange"),
    ],
)
def test_what_a_stage_cannot_change_is_named(place: Path, stage: str, problem: str):
    if "strange" in stage:
        (place / "strange.toml").write_text(
            '[corpus]\nsource = "other.jsonl"\n[tokenizer]\npath = "strange.model"\nvocab_size = 300\n'
            '[shards]\nfolder = "strange"\n'
        )
        run("tost prepare tokenizer", "strange.toml", cwd=place)
        run("tost prepare shards", "strange.toml", cwd=place)
    write_recipe(place, "wrong.toml", longer=stage)
    if "strange" in stage:
        text = (place / "wrong.toml").read_text()
        (place / "wrong.toml").write_text(text.replace('data.mixture = { "out/shards" = 3, "other" = 1 }\n', ""))
    assert problem in refused(place, "new", recipe="wrong.toml")
