"""The recipes that the project ships are valid, carry the published numbers, and fit the launches they name."""

import math
import re
from pathlib import Path

import pytest

from tost_lm.config import differences, load_config
from tost_lm.data.settings import DataPrepConfig
from tost_lm.errors import ConfigError
from tost_lm.model.flops import parameters
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
def test_every_recipe_is_valid_and_trains_on_a_node(path: Path):
    config = complete(load_config(PlanConfig, path))
    assert config.run.name == path.stem
    assert config.micro_batches >= 1
    assert memory_problem(config) is None
    words = re.findall(r"configs/pretrain/(\w+).toml", path.read_text())
    assert set(words) <= {other.stem for other in path.parent.glob("*.toml")}


@pytest.mark.parametrize("path", sorted((CONFIGS / "pretrain").glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_for_gpus_has_the_zero_stage_that_takes_the_least_time(path: Path):
    if path.stem == "demo":
        pytest.skip("for CPUs")
    seconds = {}
    for stage in (0, 1, 2, 3):
        try:
            config = complete(load_config(PlanConfig, path, [f"parallel.zero_stage={stage}"]))
        except ConfigError:  # the stage does not support what the recipe sets
            continue
        if memory_problem(config) is None:
            seconds[stage] = step_seconds(config).total
    assert load_config(PlanConfig, path).parallel.zero_stage == min(seconds, key=lambda stage: seconds[stage])


@pytest.mark.parametrize("name", ["delta_350m", "delta_1b_32k", "delta_3b_128k"])
def test_recipes_with_full_attention_fit_8_and_64_gpus(name: str):
    for nodes in (1, 8):
        config = complete(load_config(PlanConfig, CONFIGS / f"pretrain/{name}.toml", [f"cluster.nodes={nodes}"]))
        assert config.micro_batches >= 1
        assert memory_problem(config) is None
        assert config.model.kept_tokens is None


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


@pytest.mark.parametrize("size", SIZES)
def test_what_its_head_says_for_each_number_of_nodes(size: str):
    path = recipe(size)
    said = re.findall(r"^#   N = ([\d, or]+?)  +(nothing|\S+=.*)$", path.read_text(), re.MULTILINE)
    nodes = {int(number): words for numbers, words in said for number in re.findall(r"\d+", numbers)}
    assert {2, 3, 4, 8, 16, 32, 64} <= set(nodes)
    for number, words in nodes.items():
        overrides = [f"cluster.nodes={number}", *(words.split() if words != "nothing" else [])]
        config = load_config(PlanConfig, path, overrides)
        assert config.micro_batches >= 1
        assert memory_problem(config) is None


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


def test_the_hybrid_trains_on_as_many_tokens_and_up_to_64_nodes():
    path = CONFIGS / "pretrain/owt_hybrid_base.toml"
    paper, config = load_config(PretrainConfig, recipe("base")), load_config(PretrainConfig, path)
    assert config.train.steps * config.batch_tokens == paper.train.steps * paper.batch_tokens
    assert config.model.position_limit is None
    for nodes, micro_batch in {1: 64, 2: 32, 4: 16, 8: 8, 16: 4, 32: 2, 64: 1}.items():
        assert config.model_copy(
            update={"train": config.train.model_copy(update={"micro_batch_size": micro_batch})}
        ).accumulation(8 * nodes)
    for size in ("medium", "large"):
        words = [f"model.preset=hybrid-{size}", "train.micro_batch_size=4", "run.name=larger"]
        assert memory_problem(load_config(PlanConfig, path, words)) is None


@pytest.mark.parametrize(("size", "nodes"), [("1b", 16), ("3b", 32)])
@pytest.mark.parametrize("kind", ["slots", "hybrid"])
def test_larger_recipes_have_20_tokens_for_each_parameter_and_shared_batches(kind: str, size: str, nodes: int):
    config = load_config(PretrainConfig, CONFIGS / f"pretrain/{kind}_{size}.toml")
    assert config.model.preset == f"{kind}-{size}"
    assert config.model.position_limit is None
    assert config.train.steps * config.batch_tokens / parameters(config.model).total == pytest.approx(20, rel=0.02)
    for number in (1, 2, 4, 8, nodes // 2, nodes):
        assert config.accumulation(8 * number)


def recipe(name: str) -> Path:
    return CONFIGS / f"pretrain/owt_tost_{name}.toml"
