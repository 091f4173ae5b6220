"""The engine of DeepSpeed trains as one process does, and skips steps that are not finite. test_zero.py resumes it."""

import math

import pytest
import torch
from engine_state import whole_weights
from training_on_layouts import LR, T, build_engine, layout_of, micro_batches, train_in_one_process, train_steps

from tost_lm.errors import TrainingError
from tost_lm.pretrain.step import train_step
from tost_lm.pretrain.tiled import tile
from tost_lm.testing import assert_as_accurate, run_on_ranks

CLIP = 0.5
DEEPSPEED = {"engine": "deepspeed"}


def trained(sequence: int, stages: list[int]) -> list[dict[str, torch.Tensor]]:
    """Losses and norms of three steps, and the last weights."""
    found = []
    for stage in stages:
        layout = layout_of(**DEEPSPEED, zero_stage=stage, sequence=sequence)
        engine = build_engine(layout, "adamw", grad_clip=CLIP)
        losses, norms = zip(*train_steps(engine, "adamw", range(3)), strict=True)
        found.append({"losses": torch.tensor(losses), "norms": torch.tensor(norms), **whole_weights(engine)})
    return found


@pytest.mark.parametrize(("sequence", "stages"), [pytest.param(1, [1], marks=pytest.mark.quick), (2, [1, 2, 3])])
def test_two_ranks_train_as_one_process(sequence: int, stages: list[int]):
    theirs, truth = (
        {"losses": torch.tensor(record.losses), "norms": torch.tensor(record.norms), **record.weights}
        for record in (train_in_one_process("adamw", CLIP, dtype) for dtype in (torch.float32, torch.float64))
    )
    for ours in run_on_ranks(trained, 2, sequence, stages)[0]:
        for name, exact in truth.items():
            assert_as_accurate(ours[name], theirs[name], exact, name)


def misaligned(bfloat16: bool) -> list[str]:
    """Parameters of 768 elements or more that do not begin at a multiple of 16 bytes."""
    shape = {"layers": 2, "pattern": "DT", "heads": 12, "width": 768, "vocab_size": 96}
    found = []
    for stage in (1, 2):
        engine = build_engine(layout_of(**DEEPSPEED, zero_stage=stage), "adamw", bfloat16=bfloat16, **shape)
        assert any(p.numel() % 8 for p in engine.module.parameters())
        large = ((name, p) for name, p in engine.module.named_parameters() if p.numel() >= 768)
        found += [f"{name} at stage {stage}" for name, p in large if p.data_ptr() % 16]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("bfloat16", [False, True])
def test_large_parameters_begin_where_gpus_load_16_bytes(bfloat16: bool):
    assert run_on_ranks(misaligned, 2, bfloat16) == [[]] * 2


def skip(stages: list[int]) -> list[tuple[float, bool, str]]:
    """Norm of a step that is not finite, whether it left the weights, and the error if a finite one is refused."""
    found = []
    for stage in stages:
        engine = build_engine(layout_of(**DEEPSPEED, zero_stage=stage), "adamw")
        train_steps(engine, "adamw", range(1))
        before = whole_weights(engine)
        tiling = tile(engine.mesh, T)
        hook = engine.module.norm.register_forward_hook(lambda module, inputs, y: y * math.inf)
        norm = train_step(engine, micro_batches(engine.mesh, tiling, 1), tiling, LR["adamw"]).grad_norm
        hook.remove()
        left = all(torch.equal(before[name], weight) for name, weight in whole_weights(engine).items())
        with pytest.raises(TrainingError) as refused:
            train_step(engine, micro_batches(engine.mesh, tiling, 1), tiling, 1.0, lambda loss, norm: "no")
        found.append((norm, left, str(refused.value)))
    return found


def test_steps_that_are_not_finite_are_skipped_and_others_cannot_be():
    for outcomes in run_on_ranks(skip, 2, [1, 2, 3]):
        for norm, left, refused in outcomes:
            assert norm == math.inf
            assert left
            assert "DeepSpeed cannot skip an update" in refused
