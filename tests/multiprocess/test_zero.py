"""Resuming under ZeRO: to the bit on the same mix of ranks, to rounding on another; and bfloat16."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from training_on_mixes import build_engine, take_steps

from tost_lm.config import validate
from tost_lm.parallel import zero
from tost_lm.parallel.config import ParallelConfig
from tost_lm.parallel.world import is_rank_0
from tost_lm.testing import run_on_ranks

Curve = list[tuple[float, float]]


def stop_and_resume(mix: ParallelConfig, bfloat16: bool) -> tuple[Curve, Curve, bool]:
    engine = build_engine(mix, "adamw", bfloat16=bfloat16)
    take_steps(engine, "adamw", range(3))
    weights, moments = dict(zero.full_weights(engine)), list(zero.full_moments(engine))
    went_on = take_steps(engine, "adamw", range(3, 6))
    fresh = build_engine(mix, "adamw", bfloat16=bfloat16, weights=weights)
    zero.restore(fresh, weights, iter(moments), step=3)
    resumed = take_steps(fresh, "adamw", range(3, 6))
    pairs = list(zip(zero.full_weights(engine), zero.full_weights(fresh), strict=True))
    return went_on, resumed, all(torch.equal(a, b) for (_, a), (_, b) in pairs)


def stop_and_resume_in_all_stages(tensor: int, sequence: int) -> list[tuple[Curve, Curve, bool]]:
    outcomes = []
    for stage in (0, 1, 2, 3):
        mix = validate(ParallelConfig, {"tensor": tensor, "sequence": sequence, "zero_stage": stage}, "test")
        outcomes += [stop_and_resume(mix, bfloat16) for bfloat16 in ((False, True) if stage in (1, 3) else (False,))]
    return outcomes


@pytest.mark.parametrize(("tensor", "sequence"), [(1, 1), (2, 1)])
def test_resuming_is_not_having_stopped_to_the_bit(tensor: int, sequence: int):
    for outcomes in run_on_ranks(stop_and_resume_in_all_stages, 2, tensor, sequence):
        for went_on, resumed, same_weights in outcomes:
            assert resumed == went_on
            assert same_weights


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


def curves_of_mixes(bfloat16: bool) -> list[Curve]:
    mixes = [ParallelConfig(), ParallelConfig(tensor=2), ParallelConfig(sequence=2, zero_stage=3)]
    engines = (build_engine(mix, "adamw", bfloat16=bfloat16) for mix in mixes)
    return [take_steps(engine, "adamw", range(5)) for engine in engines]


def test_bfloat16_training_stays_near_float32():
    wide, narrow = (torch.tensor(run_on_ranks(curves_of_mixes, 2, choice)[0]) for choice in (False, True))
    assert not torch.equal(wide, narrow)
    torch.testing.assert_close(narrow[..., 0], wide[..., 0], rtol=0, atol=0.05)
    torch.testing.assert_close(narrow[..., 1], wide[..., 1], rtol=0.05, atol=0)
