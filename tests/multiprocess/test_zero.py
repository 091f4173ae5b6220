"""Resuming under ZeRO, without the files: to the bit on the same parallel layout; bfloat16; timeouts."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_state import whole_state, whole_weights
from torch.distributed import distributed_c10d
from training_on_layouts import build_engine, layout_of, restore, train_steps

from tost_lm.parallel.settings import ParallelConfig
from tost_lm.parallel.timeouts import Timeouts
from tost_lm.testing import run_on_ranks

Curve = list[tuple[float, float]]


def stop_and_resume(layout: ParallelConfig, bfloat16: bool) -> tuple[Curve, Curve, bool]:
    engine = build_engine(layout, "adamw", bfloat16=bfloat16)
    train_steps(engine, "adamw", range(3))
    state = whole_state(engine)
    went_on = train_steps(engine, "adamw", range(3, 6))
    fresh = build_engine(layout, "adamw", bfloat16=bfloat16)
    restore(fresh, state, step=3)
    resumed = train_steps(fresh, "adamw", range(3, 6))
    pairs = list(zip(whole_weights(engine).values(), whole_weights(fresh).values(), strict=True))
    return went_on, resumed, all(torch.equal(a, b) for a, b in pairs)


def stop_and_resume_each(layouts: list[ParallelConfig], bfloat16: bool) -> list[tuple[Curve, Curve, bool]]:
    return [stop_and_resume(layout, bfloat16) for layout in layouts]


@pytest.mark.parametrize(
    ("settings", "stages", "bfloat16"),
    [
        pytest.param({}, (2,), False, marks=[pytest.mark.slow, pytest.mark.quick]),
        *(({"engine": "deepspeed"}, (1, 2, 3), bfloat16) for bfloat16 in (False, True)),
        *(
            pytest.param({"tensor": tensor}, *case, marks=pytest.mark.slow)
            for tensor in (1, 2)
            for case in [((0, 1, 2, 3), False), ((1, 3), True)]
        ),
    ],
)
def test_resuming_is_not_having_stopped_to_the_bit(settings: dict[str, Any], stages: tuple[int, ...], bfloat16: bool):
    layouts = [layout_of(**settings, zero_stage=stage) for stage in stages]
    for outcomes in run_on_ranks(stop_and_resume_each, 2, layouts, bfloat16):
        for went_on, resumed, same_weights in outcomes:
            assert resumed == went_on
            assert same_weights


def updates_in_place(cases: list[tuple[ParallelConfig, bool]]) -> list[bool]:
    found = []
    for layout, bfloat16 in cases:
        engine = build_engine(layout, "adamw", bfloat16=bfloat16)
        updated = {tensor.data_ptr() for _, tensor in engine.own_state()}
        found.append(all(parameter.data_ptr() in updated for parameter in engine.module.parameters()))
    return found


def test_a_single_rank_updates_its_float32_weights_in_place():
    stages = [layout_of(zero_stage=stage) for stage in (0, 1, 2, 3)]
    cases = [*((layout, False) for layout in stages), (stages[1], True)]
    assert run_on_ranks(updates_in_place, 1, cases) == [[True, True, True, True, False]]


def timeouts_of_groups(layouts: list[ParallelConfig]) -> set[float]:
    """Seconds after which collectives time out, in all process groups that training uses."""
    for layout in layouts:
        build_engine(layout, "adamw")
    groups = [group for group in distributed_c10d._world.pg_map if group != dist.group.WORLD]
    return {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups}


def test_every_process_group_has_the_timeout_of_the_run():
    layouts = [ParallelConfig(engine="deepspeed"), ParallelConfig(tensor=2, zero_stage=3), ParallelConfig(sequence=2)]
    layouts += [ParallelConfig(shard_ranks=2)]
    assert run_on_ranks(timeouts_of_groups, 4, layouts) == [{Timeouts().collective}] * 4
