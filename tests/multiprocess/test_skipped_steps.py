"""A step that must not be applied leaves weights and optimizer as they were, on every rank, to the bit."""

import math
import re
from typing import Any

import pytest
import torch
from engine_state import whole_state
from torch import Tensor
from training_on_layouts import LR, T, build_engine, micro_batches

from tost_lm.checkpointing.format import Progress
from tost_lm.config import validate
from tost_lm.parallel.settings import ParallelConfig
from tost_lm.pretrain.spikes import SpikeGuard
from tost_lm.pretrain.step import Outcome, train_step
from tost_lm.pretrain.tiled import tile
from tost_lm.testing import run_on_ranks

FAULTS = ["loss", "gradient", "spike"]


def everything(engine: Any) -> dict[str, Tensor]:
    # Stage 3 keeps a partition of each and fills in the whole when it likes.
    weights = {f"model/{n}": getattr(p, "ds_tensor", p).detach().clone() for n, p in engine.parameters.items()}
    return weights | whole_state(engine)


def step(engine: Any, number: int, fault: str = "", at: int = 0) -> Outcome:
    """One step; `fault` strikes on rank `at` alone."""
    mesh = engine.mesh
    tiling = tile(mesh, T)
    guard = SpikeGuard(6.0 if fault == "spike" else None, 10, Progress(0, 0, recent=((4.0, 1e-9),) * 64))
    handles = []
    if fault in ("loss", "gradient") and torch.distributed.get_rank() == at:
        if fault == "loss":
            forward = engine.module.head.register_forward_hook
            handles = [forward(lambda module, args, output: (output[0] * math.inf, *output[1:]))]
        else:
            grow = engine.module.norm.register_full_backward_hook
            handles = [grow(lambda module, dx, dy: (dx[0] * math.inf,))]
    outcome = train_step(engine, micro_batches(mesh, tiling, number), tiling, LR["adamw"], guard.reason_to_skip)
    for handle in handles:
        handle.remove()
    return outcome


def skipped_on_a_mix(settings: dict[str, Any], bfloat16: bool, optimizer: str) -> list[tuple[str, bool, bool]]:
    """Each fault on two ranks between good steps: (reason_to_skip, nothing changed, a good step goes through)."""
    engine = build_engine(validate(ParallelConfig, settings, "test"), optimizer, bfloat16=bfloat16)
    step(engine, 0)
    found = []
    for number in range(2):
        for fault in FAULTS:
            before = everything(engine)
            outcome = step(engine, number, fault, at=number)
            after = everything(engine)
            unchanged = all(torch.equal(after[name], tensor) for name, tensor in before.items())
            found.append((outcome.reason_to_skip, unchanged, not step(engine, number).reason_to_skip))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "settings", "bfloat16", "optimizer"),
    [
        # and AdamW for parameters that are no matrices
        pytest.param(2, {"zero_stage": 0}, False, "muon", marks=pytest.mark.quick),
        pytest.param(2, {"zero_stage": 1}, False, "adamw", marks=pytest.mark.quick),
        (2, {"zero_stage": 2}, True, "adamw"),
        (4, {"zero_stage": 1, "tensor": 2}, True, "adamw"),
        (4, {"zero_stage": 3, "tensor": 2}, False, "adamw"),
        (4, {"zero_stage": 1, "sequence": 2}, False, "adamw"),
        (4, {"zero_stage": 2, "shard_ranks": 2}, False, "adamw"),
    ],
)
def test_every_rank_skips_alike_and_nothing_changes(
    ranks: int, settings: dict[str, Any], bfloat16: bool, optimizer: str
):
    results = run_on_ranks(skipped_on_a_mix, ranks, settings, bfloat16, optimizer)
    assert all(result == results[0] for result in results)
    for number, (reason_to_skip, unchanged, goes_on) in enumerate(results[0]):
        fault = FAULTS[number % len(FAULTS)]
        says = {"loss": r"loss is (inf|nan)", "gradient": "gradient norm is", "spike": "standard deviations"}[fault]
        assert re.search(says, reason_to_skip), (fault, reason_to_skip)
        assert unchanged, (fault, number)
        assert goes_on
