"""The data to train on: a folder or a mixture, from files and the command line, written down so that it reads back."""

import re
from pathlib import Path
from typing import Any

import pytest

from tost_lm.config import differences_of_trees, load_config, section_of, to_toml
from tost_lm.errors import ConfigError
from tost_lm.pretrain.sections import StageConfig
from tost_lm.pretrain.settings import PretrainConfig, longer_batches

BASE = """
[model]
layers = 1
heads = 1
width = 4
vocab_size = 8
max_positions = 8
[train]
steps = 9
global_batch_size = 12
micro_batch_size = 2
seq_len = 8
[run]
name = "r"
"""


def read(folder: Path, data: str, *overrides: str) -> PretrainConfig:
    path = folder / "some.toml"
    path.write_text(BASE + data)
    return load_config(PretrainConfig, path, overrides)


def test_an_override_changes_a_setting_of_a_stage_by_its_name(tmp_path: Path):
    data = f'[data]\nfolder = "a"\n{STAGE}'
    (stage,) = read(tmp_path, data, "stages.longer.train.seq_len=4", "stages.longer.from_step=7").stages
    assert (stage.from_step, stage.train) == (7, {"seq_len": 4})
    assert problem_of(tmp_path, data, "stages.d.from_step=7").endswith(": d: no such name; choose from longer")
    assert "stages is a setting, not a section" in problem_of(tmp_path, data, "stages.longer=7")
    assert "optim.rate: unknown key" in problem_of(tmp_path, data, "stages.longer.optim.rate=7")


def problem_of(folder: Path, data: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        read(folder, data, *overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_mixture_comes_from_a_file_or_from_the_command_line_and_reads_back(tmp_path: Path):
    expected = {Path("data/a.b/shards"): 0.7, Path("c"): 3.0}
    config = read(tmp_path, '[data.mixture]\n"data/a.b/shards" = 0.7\nc = 3\n')
    assert config.data.folders == expected
    assert read(tmp_path, "", 'data.mixture={"data/a.b/shards" = 0.7, c = 3}').data.folders == expected
    (tmp_path / "written.toml").write_text(to_toml(config))
    assert load_config(PretrainConfig, tmp_path / "written.toml") == config
    assert read(tmp_path, '[data]\nfolder = "d"\n').data.folders == {Path("d"): 1.0}


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ("[data]\n", "exactly one of data.folder and data.mixture must be set, but neither is"),
        ('[data]\nfolder = "a"\nmixture = {b = 1}\n', "must be set, but both are"),
        ("[data]\nmixture = {}\n", "data.mixture is empty; name"),
        ("[data.mixture]\na = 1\nb = 0\n", "data.mixture: the weight of b is 0.0; set one above 0"),
        ('[data.mixture]\n"d/a" = 1\n"./d//a/" = 2\n', "data.mixture: d/a is listed twice; give it one weight"),
        ('[data.mixture]\na = "much"\n', "data.mixture.a: "),
    ],
)
def test_mistakes_in_the_data_are_one_line(tmp_path: Path, data: str, problem: str):
    assert problem in problem_of(tmp_path, data)


MUON = 'optim.kind "muon" needs whole matrices and gradients on each rank, and parallel.'
FIX = 'set parallel.engine = "fsdp"'


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("data.packing=tight", "data.packing: "),
        ("data.workers=-1", "data.workers: "),
        ("evaluation.interval=5", "evaluation.interval and evaluation.tasks belong together: set both or neither"),
        ('evaluation.tasks=["x"]', "evaluation.interval and evaluation.tasks belong together: set both or neither"),
        (
            "optim.schedule=wsd optim.decay_steps=10",
            "optim.decay_steps 10 and a warm-up of 0 steps are more than train.steps 9: lower optim.decay_steps",
        ),
        ("train.seq_len=65", "train.seq_len 65 is longer than model.max_positions"),
        ("parallel.offload=optimizer", "needs ZeRO stage 2 or higher: parallel.zero_stage 1;"),
        ("run.profile_steps=[3,2]", "run.profile_steps: give the first and the last step, counted from 1, got [3, 2]"),
        ("model.pattern=G", "invalid model.pattern: 'G'; use the letters T (TSSA), D (gated delta rule)"),
        ("train.tokens=7e9 train.steps=9", "train.steps and train.tokens exclude each other: set one of them"),
        ("train.global_batch_size=1 train.batch_tokens=8", "train.global_batch_size and train.batch_tokens exclude"),
        ("train.batch_tokens=100", "100 is not a multiple of train.seq_len 8: set train.batch_tokens=96"),
        ("train.batch_tokens=3", "3 is not a multiple of train.seq_len 8: set train.batch_tokens=8"),
        ("train.tokens=1.5", "train.tokens 1.5: not a whole number above 0; write it as 7000000000 or 7e9"),
        ("train.tokens=-1", "train.tokens -1: not a whole number"),
        ("train.batch_tokens=true", "train.batch_tokens True: not a whole number"),
        ("train.tokens=7B", "train.tokens '7B': not a whole number"),
        ("train.tokens=nan", "train.tokens nan: not a whole number"),
        ("train.global_batch_size=9223372036854775806", "train.global_batch_size: input should be less than or equal"),
        ("train.tokens=1e99", "train.steps: input should be less than or equal to 1099511627776"),
        ("train.tokens=96 train.seq_len=x", "train.seq_len: input should be a valid integer, got 'x'"),
        ("train.tokens=96 train.global_batch_size=0", "train.global_batch_size: input should be greater than 0, got 0"),
        ("parallel.zero_stage=0 parallel.shard_ranks=2", "parallel.shard_ranks: ZeRO stage 0 shards nothing"),
        (
            "train.compile=true model.heads=2 parallel.tensor=2",
            "train.compile does not support parallel.tensor 2, whose communication is no part of a compiled graph: set "
            "train.compile = false or parallel.tensor = 1",
        ),
        *(
            (f"parallel.engine=deepspeed {words}", f'parallel.engine "deepspeed" does not support it; {FIX}')
            for words in (
                "parallel.tensor=2",
                "parallel.shard_ranks=2",
                "parallel.zero_stage=2 parallel.offload=optimizer",
                "train.skip_spike_sigma=6",
                "memory.tile_tokens=4",
                "memory.tile_tokens=auto",
                "train.compile=true parallel.zero_stage=3",
                "memory.mlp_tile_tokens=4 parallel.zero_stage=3",
                "parallel.zero_stage=0",
            )
        ),
        *(
            (
                f"optim.kind=muon model.heads=2 parallel.zero_stage=0 parallel.{name}={found}",
                f'{MUON}{name} {found} divides them: set parallel.{name} = {fix} or optim.kind = "adamw"',
            )
            for name, found, fix in (("tensor", 2, 1), ("zero_stage", 1, 0), ("zero_stage", 3, 0))
        ),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, words: str, problem: str):
    assert problem in problem_of(tmp_path, '[data]\nfolder = "a"\n', *words.split())


@pytest.mark.parametrize(
    ("words", "steps", "batch"),
    [
        ("train.tokens=960", 10, 12),
        ("train.tokens=9.61e2", 11, 12),
        ("train.batch_tokens=64", 9, 8),
        ("train.tokens=7e3 train.batch_tokens=7e1 train.seq_len=7", 100, 10),
        ("train.tokens=960 train.global_batch_size=6", 20, 6),
        ("train.batch_tokens=64 train.seq_len=4", 9, 16),
    ],
)
def test_tokens_become_steps_and_sequences(tmp_path: Path, words: str, steps: int, batch: int):
    config = read(tmp_path, '[data]\nfolder = "d"\n', *words.split())
    assert (config.train.steps, config.train.global_batch_size) == (steps, batch)
    written = to_toml(config)
    assert not re.search(r"^(tokens|batch_tokens) =", written, re.M)
    (tmp_path / "written.toml").write_text(written)
    assert load_config(PretrainConfig, tmp_path / "written.toml") == config


def test_an_override_replaces_the_setting_of_the_file_that_it_excludes(tmp_path: Path):
    path = tmp_path / "tokens.toml"
    in_tokens = BASE.replace("steps = 9", "tokens = 9.6e2").replace("global_batch_size = 12", "batch_tokens = 64")
    path.write_text(in_tokens + '[data]\nfolder = "d"\n')
    chosen = [
        load_config(PretrainConfig, path, words)
        for words in ([], ["train.steps=3"], ["train.global_batch_size=4"], ["train.seq_len=4"])
    ]
    assert [(one.train.steps, one.train.global_batch_size) for one in chosen] == [(15, 8), (3, 8), (30, 4), (15, 16)]
    path.write_text(path.read_text().replace("[train]", '[train]\ninitial_weights = "a"'))
    assert load_config(PretrainConfig, path, ["train.branch_from=b"]).train.initial_weights is None
    for words in (["data.mixture.a=1"], ['data.mixture={"a" = 1}']):
        assert load_config(PretrainConfig, path, words).data.folders == {Path("a"): 1.0}


def changes(tmp_path: Path, data: str, *overrides: str) -> list[str]:
    recorded = read(tmp_path, '[data.mixture]\n"x/y" = 1\nz = 2\n')
    both = (config.in_stages()[0].what_is_trained() for config in (recorded, read(tmp_path, data, *overrides)))
    return differences_of_trees(*both)


def test_what_may_change_between_launches(tmp_path: Path):
    same: Any = '[data.mixture]\nz = 2\n"x/y" = 1\n'
    assert changes(tmp_path, same, "data.workers=0", "train.micro_batch_size=3") == []
    assert changes(tmp_path, same, "evaluation.interval=5", 'evaluation.tasks=["x"]', "evaluation.sets.y=z") == []
    assert changes(tmp_path, '[data.mixture]\n"x/y" = 1\nw = 2\n') == [
        "data.mixture.z: 2.0 → not set",
        "data.mixture.w: not set → 2.0",
    ]
    assert changes(tmp_path, same, "data.packing=best-fit") == ['data.packing: "concatenated" → "best-fit"']
    assert changes(tmp_path, '[data]\nfolder = "x/y"\n')[0] == 'data.folder: not set → "x/y"'


def test_a_default_warm_up_is_that_of_the_length(tmp_path: Path):
    data = '[data.mixture]\n"x/y" = 1\nz = 2\n'
    assert changes(tmp_path, data, "optim.warmup_steps=0") == []
    assert changes(tmp_path, data, "train.steps=20") == ["optim.warmup_steps: 0 → 2", "train.steps: 9 → 20"]


def test_a_branch_has_the_steps_after_its_checkpoint(tmp_path: Path):
    data, step = '[data]\nfolder = "a"\n', "runs/trunk/checkpoints/step_00000004"
    chosen = [
        read(tmp_path, data, *words) for words in ((), (f"train.branch_from={step}",), ("train.branch_from=x/tost",))
    ]
    assert [config.in_stages()[0].steps for config in chosen] == [9, 5, 9]


def test_a_branch_that_has_passed_a_stage_names_it(tmp_path: Path):
    data = '[data]\nfolder = "a"\n[[stages]]\nname = "b"\nfrom_step = 4\n[[stages]]\nname = "c"\nfrom_step = 6\n'
    problem = problem_of(tmp_path, data, "train.branch_from=runs/r/checkpoints/step_00000005")
    assert "stage b: from_step 4: train.branch_from is after step 5; remove the stage" in problem


def test_the_files_of_test_sets_read_back(tmp_path: Path):
    tables = '[data]\nfolder = "a"\n[evaluation]\ninterval = 5\ntasks = ["x@y"]\n[evaluation.sets]\nx = "d/x.txt"\n'
    config = read(tmp_path, tables)
    assert config.evaluation.sets == {"x": Path("d/x.txt")}
    (tmp_path / "written.toml").write_text(to_toml(config))
    assert load_config(PretrainConfig, tmp_path / "written.toml") == config


def test_packed_documents_of_a_micro_batch_lie_in_one_row(tmp_path: Path):
    assert read(tmp_path, '[data]\nfolder = "a"\n').row_tokens == 8
    assert read(tmp_path, '[data]\nfolder = "a"\n', "data.packing=best-fit").row_tokens == 16


ODD = [
    "inf",
    "-inf",
    "nan",
    "1e400",
    "-1",
    "0",
    "3",
    "0.5",
    '"x"',
    '""',
    "true",
    "[]",
    "[[1]]",
    "{}",
    "{a=inf}",
    "2000-01-01",
]
OF_THE_RUN = {"seed", "initial_weights", "branch_from", "tokens", "kind"}


@pytest.mark.parametrize("section", sorted(set(StageConfig.model_fields) - {"name", "from_step", "tokens"}))
def test_a_stage_refuses_what_the_recipe_refuses(tmp_path: Path, section: str):
    """With a message: no value is dropped, and none ends with a traceback."""
    kind, alone = section_of(PretrainConfig.model_fields[section].annotation), '[data]\nfolder = "a"\n'
    assert kind is not None
    stage = f'{alone}[[stages]]\nname = "b"\nfrom_step = 4\n'
    for name in kind.model_fields.keys() - OF_THE_RUN:
        for value in ODD:
            by_recipe = is_refused(tmp_path, alone, f"{section}.{name}={value}")
            by_stage = is_refused(tmp_path, f"{stage}{section}.{name} = {value}\n")
            assert by_stage >= by_recipe, f"{section}.{name} = {value}"
            # The settings of tasks are validated with their files.
            assert by_stage or name == "settings" or not re.search("inf|nan|1e400", value), (
                f"{section}.{name} = {value}"
            )


def is_refused(folder: Path, data: str, *overrides: str) -> bool:
    try:
        read(folder, data, *overrides)
    except ConfigError:
        return True
    return False


LONGER = "model.max_positions=64"
STAGE = "\n[[stages]]\nname = 'longer'\nfrom_step = 5\ntrain.seq_len = 64\n"


@pytest.mark.parametrize(("stage", "words", "said"), [
    ("", ["train.seq_len=32"], ["32 in place of 8 for 12 sequences makes the batch 4"]),
    ("", ["train.seq_len=32", "train.global_batch_size=3"], []),
    ("", ["train.seq_len=32", "train.batch_tokens=96"], []),
    (STAGE, [], ["64 in place of 8 for 12 sequences makes the batch 8"]),
    (STAGE + "train.global_batch_size = 12\n", [], []),
])  # fmt: skip
def test_a_longer_sequence_that_enlarges_the_batch_is_warned_of(
    tmp_path: Path, stage: str, words: list[str], said: list[str]
):
    config = read(tmp_path, f"[data]\nfolder = 'x'\n{stage}", LONGER, *words)
    found = list(longer_batches(tmp_path / "some.toml", config))
    assert [text.partition(" times as large")[0] for text in found] == [f"train.seq_len {line}" for line in said]
    assert all(text.endswith("; set train.batch_tokens=96 to keep its size") for text in found if not stage)
