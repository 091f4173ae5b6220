"""Peak memory of CPU ranks with more than 1 GB of weights until their first step: at the start and after a resume."""

from pathlib import Path

import pytest
import torch
from memory_of_training import settings_of, start_measured

from tost_lm.checkpointing.format import (
    RNG,
    RNG_NAME,
    Progress,
    flush_and_hash,
    publish_checkpoint,
    shard_name,
    write_tensors,
)
from tost_lm.checkpointing.writer import assign_writers
from tost_lm.config import validate
from tost_lm.model.lm import parameter_shapes
from tost_lm.pretrain.plan.memory import weights_and_optimizer
from tost_lm.pretrain.settings import PretrainConfig
from tost_lm.testing import run_on_ranks

RANKS, SHARDS = 2, 3
SHAPE = {"width": 2048, "layers": 4, "heads": 16, "vocab_size": 50304, "tokens": 64, "pattern": "TD"}
LAYOUTS = {
    "ZeRO stage 0": {"zero_stage": 0},
    "ZeRO stage 1": {"zero_stage": 1},
    "ZeRO stage 2": {"zero_stage": 2},
    "ZeRO stage 3": {"zero_stage": 3},
    "2 tensor ranks": {"tensor": 2},
    "2 sequence ranks": {"sequence": 2},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step folder with the state of `SHAPE`, written tensor file by tensor file."""
    folder = tmp_path_factory.mktemp("run") / "step_00000001"
    temp = folder.with_name("temp")
    temp.mkdir()
    shapes = parameter_shapes(validate(PretrainConfig, settings_of(**SHAPE), "test").model)
    assert 4 * sum(shape.numel() for shape in shapes.values()) > 1e9
    writers = assign_writers({name: shape.numel() for name, shape in shapes.items()}, SHARDS)
    for number, names in enumerate(writers):
        write_tensors(temp / shard_name("model", number, SHARDS), {name: torch.ones(shapes[name]) for name in names})
        moments = {f"{key}/{name}": torch.ones(shapes[name]) for name in names for key in ("exp_avg", "exp_avg_sq")}
        write_tensors(temp / shard_name("optimizer", number, SHARDS), moments)
    write_tensors(temp / RNG, {RNG_NAME: torch.get_rng_state()})
    Progress(step=1, updates=1).write(temp)
    publish_checkpoint(temp, folder, {file.name: flush_and_hash(file) for file in temp.iterdir()})
    return folder


@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_needs_a_tenth_more_than_its_state_and_one_parameter(layout: str, checkpoint: Path):
    settings = settings_of(**SHAPE, data_ranks=RANKS, micro_batch=1, parallel=LAYOUTS[layout])
    config = validate(PretrainConfig, settings, "test")
    largest = 4 * max(shape.numel() for shape in parameter_shapes(config.model).values())
    limit = 1.1 * sum(weights_and_optimizer(config, RANKS)) + largest
    for name, folder in {"start": None, "resume": checkpoint}.items():
        peak = max(run_on_ranks(start_measured, RANKS, settings, folder, timeout_s=600))
        print(f"{layout}, {name}: {peak / 1e9:.2f} GB of {limit / 1e9:.2f} GB")
        assert peak <= limit
