"""Blocks and portions of MLPs that are computed again, under DeepSpeed on ranks, train as if all had been held."""

from typing import Any

import pytest
from training_on_mixes import Record, build_engine, plain_training, take_steps, training_on_mix

from tost_lm.parallel import zero
from tost_lm.parallel.config import ParallelConfig
from tost_lm.testing import run_on_ranks

LESS = {"recompute": "blocks", "mlp_tokens": 5}
GRAD_CLIP = 0.5


def train_in_stages(axis: str, stages: tuple[int, ...]) -> list[Record]:
    records = []
    for stage in stages:
        mix = ParallelConfig.model_validate({axis: 2, "zero_stage": stage})
        records.append(training_on_mix(mix, "adamw", GRAD_CLIP, less=LESS))
    return records


@pytest.mark.parametrize(("axis", "stages"), [("sequence", (0, 2)), ("tensor", (1,))])
def test_ranks_train_as_one_process(axis: str, stages: tuple[int, ...]):
    for record in run_on_ranks(train_in_stages, 2, axis, stages)[0]:
        record.assert_equals(plain_training("adamw", GRAD_CLIP), relative=1e-5)


def train_with_all_weights_partitioned(less: list[dict[str, Any]]) -> list[Record]:
    """DeepSpeed would hold so small a model whole; here every weight is gathered when a module needs it."""
    settings = zero._offload
    limits = ("max_live_parameters", "max_reuse_distance", "prefetch_bucket_size", "param_persistence_threshold")
    zero._offload = lambda parallel: {**settings(parallel), **{f"stage3_{limit}": 0 for limit in limits}}
    mix = ParallelConfig(sequence=2, zero_stage=3)
    return [training_on_mix(mix, "adamw", GRAD_CLIP, steps=2, less=one) for one in less]


def test_weights_of_stage_3_are_gathered_again():
    for record in run_on_ranks(train_with_all_weights_partitioned, 2, [{"recompute": "blocks"}, LESS])[0]:
        record.assert_equals(plain_training("adamw", GRAD_CLIP, steps=2), relative=1e-5)


def train_in_bfloat16() -> list[list[tuple[float, float]]]:
    mix = ParallelConfig(sequence=2, zero_stage=2)
    engines = [build_engine(mix, "adamw", bfloat16=True, less=less) for less in ({}, {"recompute": "blocks"})]
    return [take_steps(engine, "adamw", range(2)) for engine in engines]


def test_blocks_of_bfloat16_are_computed_again_to_the_bit():
    held, computed_again = run_on_ranks(train_in_bfloat16, 2)[0]
    assert held == computed_again
