"""Resume with every ZeRO stage: bitwise on the same parallel layout, up to rounding on another."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_zero import Curve, assert_resumed_to_the_bit
from torch import Tensor
from training_on_layouts import build_engine, restore, train_steps

from tost_lm.parallel import zero
from tost_lm.parallel.settings import ParallelConfig
from tost_lm.testing import FLOAT32_REORDERED, run_on_ranks


@pytest.mark.parametrize(("stages", "bfloat16"), [((0, 1, 2, 3), False), ((1, 3), True)])
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_resumed_run_equals_one_without_a_stop_bitwise(tensor: int, stages: tuple[int, ...], bfloat16: bool):
    assert_resumed_to_the_bit([{"tensor": tensor, "zero_stage": stage} for stage in stages], bfloat16)


def train_and_save(layout: ParallelConfig, path: Path) -> Curve:
    engine = build_engine(layout, "adamw")
    train_steps(engine, "adamw", range(3))
    state = dict(zero.full_weights(engine)), list(zero.full_moments(engine))
    if dist.get_rank() == 0:
        torch.save(state, path)
    return train_steps(engine, "adamw", range(3, 6))


def load_and_continue(layouts: list[ParallelConfig], path: Path) -> list[Curve]:
    state: tuple[dict[str, Tensor], list[tuple[str, str, Tensor]]] = torch.load(path)
    curves = []
    for layout in layouts:
        engine = build_engine(layout, "adamw")
        restore(engine, state[0], state[1], step=3)
        curves.append(train_steps(engine, "adamw", range(3, 6)))
    return curves


def test_a_run_resumes_on_another_parallel_layout(tmp_path: Path):
    path = tmp_path / "state.pt"
    expected = run_on_ranks(train_and_save, 4, ParallelConfig(tensor=2, sequence=2, zero_stage=3), path)[0]
    layouts = {
        1: [ParallelConfig(zero_stage=0)],
        2: [ParallelConfig(tensor=2, zero_stage=1), ParallelConfig(sequence=2, zero_stage=3)],
        4: [ParallelConfig(zero_stage=2), ParallelConfig(tensor=4, zero_stage=0)],
    }
    for ranks, choices in layouts.items():
        for resumed in run_on_ranks(load_and_continue, ranks, choices, path)[0]:
            assert np.array(resumed) == pytest.approx(np.array(expected), rel=FLOAT32_REORDERED)
