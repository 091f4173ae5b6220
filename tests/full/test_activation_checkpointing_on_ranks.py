"""Activation checkpointing and MLP tiles on ranks do not change training."""

from functools import partial

import pytest
from training_on_layouts import build_engine, train_in_stages, train_steps

from tost_lm.parallel.settings import ParallelConfig
from tost_lm.testing import run_on_ranks

FULL = {"activation_checkpointing": "full"}
TILED = {**FULL, "mlp_tile_tokens": 5}
GRAD_CLIP = 0.5


@pytest.mark.parametrize(("axis", "stages"), [("sequence", (0, 2, 3)), ("tensor", (1,))])
def test_ranks_train_as_one_process(axis: str, stages: tuple[int, ...]):
    run = partial(train_in_stages, memory=TILED)
    for record in run_on_ranks(run, 2, {axis: 2}, stages, "adamw", GRAD_CLIP)[0]:
        record.assert_as_one_process("adamw", GRAD_CLIP)


def train_in_bfloat16() -> list[list[tuple[float, float]]]:
    layout = ParallelConfig(sequence=2, zero_stage=2)
    engines = [build_engine(layout, "adamw", bfloat16=True, memory=memory) for memory in ({}, FULL)]
    return [train_steps(engine, "adamw", range(2)) for engine in engines]


def test_activation_checkpointing_in_bfloat16_is_bitwise_equal():
    without, full = run_on_ranks(train_in_bfloat16, 2)[0]
    assert without == full
