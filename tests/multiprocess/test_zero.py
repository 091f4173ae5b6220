"""Resuming under ZeRO, without the files: to the bit on the same parallel layout; bfloat16; buckets of DeepSpeed."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from training_on_layouts import ENGINES, LR, T, build_engine, build_model, micro_batches, restore, train_steps

from tost_lm import sizes
from tost_lm.config import validate
from tost_lm.parallel.settings import ParallelConfig
from tost_lm.parallel.timeouts import Timeouts
from tost_lm.pretrain.step import train_step
from tost_lm.pretrain.tiled import tile
from tost_lm.testing import run_on_ranks

Curve = list[tuple[float, float]]


def stop_and_resume(layout: ParallelConfig, bfloat16: bool) -> tuple[Curve, Curve, bool]:
    engine = build_engine(layout, "adamw", bfloat16=bfloat16)
    train_steps(engine, "adamw", range(3))
    weights, moments = dict(engine.full_weights()), list(engine.full_moments())
    went_on = train_steps(engine, "adamw", range(3, 6))
    fresh = build_engine(layout, "adamw", bfloat16=bfloat16)
    restore(fresh, weights, moments, step=3)
    resumed = train_steps(fresh, "adamw", range(3, 6))
    pairs = list(zip(engine.full_weights(), fresh.full_weights(), strict=True))
    return went_on, resumed, all(torch.equal(a, b) for (_, a), (_, b) in pairs)


def stop_and_resume_each(layouts: list[ParallelConfig], bfloat16: bool) -> list[tuple[Curve, Curve, bool]]:
    return [stop_and_resume(layout, bfloat16) for layout in layouts]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("tensor", "stages", "bfloat16"),
    [
        pytest.param(1, (2,), False, marks=pytest.mark.quick),
        *((tensor, *case) for tensor in (1, 2) for case in [((0, 1, 2, 3), False), ((1, 3), True)]),
    ],
)
def test_resuming_is_not_having_stopped_to_the_bit(tensor: int, stages: tuple[int, ...], bfloat16: bool, engine: str):
    layouts = [{"tensor": tensor, "zero_stage": stage, "engine": engine} for stage in stages]
    validated = [validate(ParallelConfig, layout, "test") for layout in layouts]
    for outcomes in run_on_ranks(stop_and_resume_each, 2, validated, bfloat16):
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


@pytest.mark.parametrize("engine", ENGINES)
def test_a_single_rank_updates_its_float32_weights_in_place(engine: str):
    stages = [validate(ParallelConfig, {"zero_stage": stage, "engine": engine}, "test") for stage in (0, 1, 2, 3)]
    cases = [*((layout, False) for layout in stages), (stages[1], True)]
    assert run_on_ranks(updates_in_place, 1, cases) == [[True, True, True, True, False]]


def curves_in_buckets(layouts: list[ParallelConfig], bfloat16: bool) -> list[tuple[Curve, Curve, int]]:
    """Trained with one bucket and with buckets of the largest parameter, and how many of these there are at least."""
    found = []
    for layout in layouts:
        curves = []
        for sizes.BUCKET_ELEMENTS in (10**9, 1):
            engine = build_engine(layout, "adamw", bfloat16=bfloat16)
            curves.append(train_steps(engine, "adamw", range(4)))
        buckets = sum(p.numel() for p in build_model().parameters()) // engine._engine.zero_reduce_bucket_size()
        assert engine._engine.zero_overlap_comm()
        found.append((curves[0], curves[1], buckets))
    return found


@pytest.mark.parametrize(
    ("stages", "bfloat16"),
    [pytest.param((1, 2, 3), False, marks=pytest.mark.quick), pytest.param((2, 3), True, marks=pytest.mark.slow)],
)
def test_several_buckets_are_one_bucket_to_the_bit(stages: tuple[int, ...], bfloat16: bool):
    """Gradients of two ranks, whose sum has no order, are then reduced during the last backward."""
    layouts = [ParallelConfig(zero_stage=stage) for stage in stages]  # pyright: ignore[reportArgumentType]
    for outcomes in run_on_ranks(curves_in_buckets, 2, layouts, bfloat16):
        for whole, in_buckets, buckets in outcomes:
            assert buckets > 2
            assert in_buckets == whole


def with_loops_of_deepspeed(engine: Any) -> Any:
    """An engine of bfloat16 at stage 1 with DeepSpeed's own methods, which loop over the parameters."""
    del engine._engine.optimizer.step, engine._engine.optimizer.update_hp_grads
    engine._engine.enable_backward_allreduce = True
    return engine


def skipping_the_second(engine: Any, optimizer: str, steps: range) -> Curve:
    """Loss and gradient norm of each step; the update of the second one is skipped."""
    mesh, found = engine.mesh, []
    tiling = tile(mesh, T, None)
    for step in steps:
        skips = lambda loss, norm, step=step: "skipped" * (step == 1)
        outcome = train_step(engine, micro_batches(mesh, tiling, step), tiling, LR[optimizer], skips)
        found.append((outcome.loss, outcome.grad_norm))
    return found


def short_and_long_steps(layouts: list[dict[str, int]]) -> list[tuple[list[Curve], float]]:
    """Losses and norms without and with DeepSpeed's loops, and the largest difference of a weight."""
    found = []
    for layout in layouts:
        parallel = validate(ParallelConfig, layout, "test")
        short, long = (build_engine(parallel, "adamw", bfloat16=True, grad_clip=0.3) for _ in range(2))
        curves = [skipping_the_second(engine, "adamw", range(4)) for engine in (short, with_loops_of_deepspeed(long))]
        pairs = zip(short.full_weights(), long.full_weights(), strict=True)
        found.append((curves, max(float((a - b).abs().max()) for (_, a), (_, b) in pairs)))
    return found


@pytest.mark.parametrize(
    ("ranks", "layouts"), [(1, [{}]), pytest.param(2, [{}, {"sequence": 2}, {"tensor": 2}], marks=pytest.mark.slow)]
)
def test_steps_in_few_launches_are_those_of_deepspeed(ranks: int, layouts: list[dict[str, int]]):
    """With two micro-batches on one rank, clipping, and a skipped step. DeepSpeed adds up squares in float32."""
    for outcome in run_on_ranks(short_and_long_steps, ranks, layouts):
        for (short, long), difference in outcome:
            assert all(norm > 0.3 for _, norm in short)
            assert torch.tensor(short) == pytest.approx(torch.tensor(long), rel=1e-6)
            assert difference < 1e-6


class Recorder(TorchDispatchMode):
    """The names of operations that launch something or wait: all but views, allocations and marks of the profiler."""

    def __init__(self) -> None:
        super().__init__()
        self.counting, self.names = False, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        if self.counting and not func.is_view and "empty" not in name and name.startswith("aten::"):
            self.names.append(name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def operations_after_the_last_backward() -> list[str]:
    """In a step of two micro-batches with clipping, by the fused AdamW of a run."""
    engine = build_engine(ParallelConfig(), "adamw", bfloat16=True, grad_clip=0.3)
    for group in engine._engine.optimizer.param_groups:
        group |= {"fused": True, "foreach": False}
    train_steps(engine, "adamw", range(1))
    counter, epilogue = Recorder(), engine._engine.optimizer.backward_epilogue

    def from_the_last_on() -> None:
        counter.counting = engine._engine.is_gradient_accumulation_boundary()
        epilogue()

    engine._engine.optimizer.backward_epilogue = from_the_last_on
    with counter:
        train_steps(engine, "adamw", range(1, 2))
    return counter.names


def test_the_optimizer_takes_few_launches_and_one_wait():
    [names] = run_on_ranks(operations_after_the_last_backward, 1)
    adamw = ["_foreach_add_", "_fused_adamw_"]  # counts its steps, then updates a parameter group
    first = names.index("_fused_adamw_") - 1
    assert names[first : first + 4] == 2 * adamw
    others = names[:first] + names[first + 4 :]
    assert others.count("_local_scalar_dense") == 1, "the only wait before the update: losses are computed by then"
    assert len(others) - 1 <= 22, others


def misaligned(stages: list[int], bfloat16: bool) -> list[str]:
    """Parameters of 768 elements or more that do not begin at a multiple of 16 bytes."""
    shape = {"layers": 2, "pattern": "DT", "heads": 12, "width": 768, "vocab_size": 96}
    found = []
    for stage in stages:
        engine = build_engine(
            validate(ParallelConfig, {"zero_stage": stage}, "test"), "adamw", bfloat16=bfloat16, **shape
        )
        assert any(p.numel() % 8 for p in engine.module.parameters())
        large = ((name, p) for name, p in engine.module.named_parameters() if p.numel() >= 768)
        found += [f"{name} at stage {stage}" for name, p in large if p.data_ptr() % 16]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "bfloat16"), [([1, 2], False), ([1, 2], True)])
def test_large_parameters_begin_where_gpus_load_16_bytes(stages: list[int], bfloat16: bool):
    assert run_on_ranks(misaligned, 2, stages, bfloat16) == [[]] * 2


def timeouts_of_groups(layouts: list[ParallelConfig]) -> set[float]:
    """Seconds after which collectives time out, in all process groups that training uses."""
    for layout in layouts:
        build_engine(layout, "adamw")
    groups = [group for group in distributed_c10d._world.pg_map if group != dist.group.WORLD]
    return {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups}


def test_every_process_group_has_the_timeout_of_the_run():
    layouts = [ParallelConfig(), ParallelConfig(tensor=2, zero_stage=3), ParallelConfig(sequence=2)]
    layouts += [layout.model_copy(update={"engine": "fsdp"}) for layout in layouts]
    assert run_on_ranks(timeouts_of_groups, 4, layouts) == [{Timeouts().collective}] * 4
