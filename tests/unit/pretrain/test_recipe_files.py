"""The recipes that the project ships are valid, carry the published numbers, and fit the launches they name."""

import math
import re
from pathlib import Path

import pytest

from tost_lm.config import differences, load_config
from tost_lm.data.settings import DataPrepConfig
from tost_lm.errors import ConfigError
from tost_lm.optim.settings import learning_rate
from tost_lm.pretrain.plan.estimate import step_seconds
from tost_lm.pretrain.plan.fit import complete, memory_problem
from tost_lm.pretrain.plan.settings import PlanConfig
from tost_lm.pretrain.settings import PretrainConfig

CONFIGS = Path(__file__).parents[3] / "configs"
SIZES = ("base", "medium", "large")


@pytest.mark.parametrize("path", sorted((CONFIGS / "data").glob("*.toml")), ids=lambda path: path.stem)
def test_corpora(path: Path):
    assert load_config(DataPrepConfig, path).shards.folder.parts[:2] == ("data", path.stem)


@pytest.mark.parametrize("path", sorted((CONFIGS / "pretrain").glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_has_its_name_and_names_others_that_exist(path: Path):
    assert load_config(PretrainConfig, path).run.name == path.stem
    words = re.findall(r"configs/pretrain/(\w+).toml", path.read_text())
    assert set(words) <= {other.stem for other in path.parent.glob("*.toml")}


@pytest.mark.parametrize("path", sorted((CONFIGS / "pretrain").glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_for_gpus_has_the_zero_stage_that_takes_the_least_time(path: Path):
    """To 1 %: with one micro-batch, stages 1 and 2 send the same."""
    if load_config(PretrainConfig, path).launch.cpu_ranks > 1:
        pytest.skip("for CPUs")
    seconds, (nodes, words) = {}, next((n, words) for n, words in launches(path).items() if words is not None)
    for stage in (0, 1, 2, 3):
        try:
            launch = [f"cluster.nodes={nodes}", *words, f"parallel.zero_stage={stage}"]
            config = complete(load_config(PlanConfig, path, launch))
        except ConfigError:  # the stage does not support what the recipe sets
            continue
        if memory_problem(config) is None:
            seconds[stage] = step_seconds(config).total
    assert seconds[load_config(PlanConfig, path, words).parallel.zero_stage] <= 1.01 * min(seconds.values())


@pytest.mark.parametrize("path", sorted((CONFIGS / "pretrain").glob("*.toml")), ids=lambda path: path.stem)
def test_the_head_has_settings_for_each_number_of_gpus(path: Path):
    """The plan has as many ranks as there are GPUs, and fits; where the head says that they are too small, it finds no
    settings that fit."""
    on_cpus = load_config(PretrainConfig, path).launch.cpu_ranks > 1
    words = launches(path)
    assert words.keys() >= ({1, 2, 4, 8} if on_cpus else {1, 2, 4, 8, 16, 32, 64})
    for number, overrides in words.items():
        launch = f"launch.ranks={number}" if on_cpus else f"cluster.nodes={number}"
        problems = []
        for stage in load_config(PlanConfig, path, [launch, *(overrides or [])]).in_stages():
            assert isinstance(stage.config, PlanConfig)
            config = complete(stage.config)
            assert config.cluster.ranks == (number if on_cpus else 8 * number)
            assert config.micro_batches >= 1
            problems.append(memory_problem(config) or "")
        assert not any(problems) if overrides is not None else any("raise cluster.nodes" in one for one in problems)


def launches(path: Path) -> dict[int, list[str] | None]:
    """By number of nodes or CPU ranks, the settings that the head of a recipe says; None: they are too small."""
    said = re.findall(r"^#   N = ([\d, or]+?) +(none|too small|\S+=.*)$", path.read_text(), re.MULTILINE)
    found = {int(n): words for numbers, words in said for n in re.findall(r"\d+", numbers)}
    known = {"none": [], "too small": None}
    words = {n: known[words] if words in known else words.split() for n, words in found.items()}
    return words or {1: [], 2: [], 4: [], 8: []}


def test_a_plan_that_cannot_use_every_gpu_is_refused():
    path = CONFIGS / "pretrain/delta_350m.toml"
    with pytest.raises(ConfigError) as error:
        complete(load_config(PlanConfig, path, ["cluster.nodes=32"]))
    assert str(error.value) == (
        "train.global_batch_size 128 is not divisible by 256 data ranks × train.micro_batch_size 8 = 2048: set "
        "parallel.sequence=2 train.micro_batch_size=1, or train.global_batch_size=2048"
    )
    found = [complete(load_config(PlanConfig, path, ["cluster.nodes=32", words])) for words in (
        "parallel.sequence=2", "train.global_batch_size=512")]  # fmt: skip
    assert [config.cluster.ranks for config in found] == [256, 256]
    assert [config.train.micro_batch_size for config in found] == [1, 2], "no more than a rank's batch"


@pytest.mark.parametrize("size", SIZES)
def test_the_papers_recipe(size: str):
    config = load_config(PretrainConfig, recipe(size))
    optim, train = config.optim, config.train
    assert (optim.lr, optim.min_lr, optim.warmup_steps, optim.beta1, optim.beta2, optim.grad_clip) == (
        6e-4, 6e-5, 2000, 0.9, 0.95, 1.0,
    )  # fmt: skip
    assert (train.steps, train.global_batch_size, train.seq_len, train.dtype) == (600_000, 480, 1024, "bfloat16")
    assert (optim.weight_decay, config.model.preset, config.model.layer_scale) == (0.1, f"tost-{size}", 1e-5)
    assert config.model.vocab_size == 50304


def test_the_authors_recipe_follows_the_released_program():
    paper, authors = (load_config(PretrainConfig, recipe(name)) for name in ("base", "base_authors"))
    assert differences(paper, authors) == [
        "optim.warmup_from_zero: false → true", "optim.weight_decay: 0.1 → 0.01", "train.steps: 600000 → 600001",
        'run.name: "owt_tost_base" → "owt_tost_base_authors"',
    ]  # fmt: skip
    for iteration in (0, 1, 1999, 2000, 2001, 300_000, 599_999, 600_000):
        if iteration < 2000:
            released = 6e-4 * iteration / 2000
        else:
            released = 6e-5 + 0.5 * (1 + math.cos(math.pi * (iteration - 2000) / 598_000)) * (6e-4 - 6e-5)
        ours = learning_rate(iteration, authors.train.steps, authors.optim)
        assert ours == pytest.approx(released, rel=1e-12)


def recipe(name: str) -> Path:
    return CONFIGS / f"pretrain/owt_tost_{name}.toml"
