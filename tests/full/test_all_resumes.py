"""Resuming under ZeRO in every stage: to the bit on the same mix of ranks, to rounding on another."""

from pathlib import Path

import pytest
import torch
from test_zero import Curve, assert_resumed_to_the_bit
from torch import Tensor
from training_on_mixes import build_engine, take_steps

from tost_lm.parallel import zero
from tost_lm.parallel.config import ParallelConfig
from tost_lm.parallel.world import is_rank_0
from tost_lm.testing import run_on_ranks


@pytest.mark.parametrize(("stages", "bfloat16"), [((0, 1, 2, 3), False), ((1, 3), True)])
@pytest.mark.parametrize("tensor", [1, 2])
def test_resuming_is_not_having_stopped_to_the_bit(tensor: int, stages: tuple[int, ...], bfloat16: bool):
    assert_resumed_to_the_bit([{"tensor": tensor, "zero_stage": stage} for stage in stages], bfloat16)


def train_and_save(mix: ParallelConfig, path: Path) -> Curve:
    engine = build_engine(mix, "adamw")
    take_steps(engine, "adamw", range(3))
    state = dict(zero.full_weights(engine)), list(zero.full_moments(engine))
    if is_rank_0():
        torch.save(state, path)
    return take_steps(engine, "adamw", range(3, 6))


def load_and_go_on(mixes: list[ParallelConfig], path: Path) -> list[Curve]:
    state: tuple[dict[str, Tensor], list[tuple[str, str, Tensor]]] = torch.load(path)
    curves = []
    for mix in mixes:
        engine = build_engine(mix, "adamw", weights=state[0])
        zero.restore(engine, state[0], iter(state[1]), step=3)
        curves.append(take_steps(engine, "adamw", range(3, 6)))
    return curves


def test_a_run_goes_on_with_another_mix_of_ranks(tmp_path: Path):
    path = tmp_path / "state.pt"
    expected = torch.tensor(
        run_on_ranks(train_and_save, 4, ParallelConfig(tensor=2, sequence=2, zero_stage=3), path)[0]
    )
    mixes = {
        1: [ParallelConfig(zero_stage=0)],
        2: [ParallelConfig(tensor=2, zero_stage=1), ParallelConfig(sequence=2, zero_stage=3)],
        4: [ParallelConfig(zero_stage=2), ParallelConfig(tensor=4, zero_stage=0)],
    }
    for ranks, choices in mixes.items():
        for resumed in run_on_ranks(load_and_go_on, ranks, choices, path)[0]:
            torch.testing.assert_close(torch.tensor(resumed), expected, rtol=1e-5, atol=0)
