"""DeepSpeed's own Muon at ZeRO stages 1 and 2, and why `optim.kind = "muon"` is refused there.

If a test fails with another version of DeepSpeed, its Muon may have become usable.
"""

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from training_on_layouts import BATCH, build_model, global_batch, micro_batch_size, train_steps

from tost_lm.parallel import zero
from tost_lm.parallel.apply import parallelize
from tost_lm.parallel.mesh import build_mesh, start_world
from tost_lm.parallel.settings import ParallelConfig
from tost_lm.testing import run_on_ranks

LR, GRAD_CLIP = 1e-3, 0.5  # as of train_steps with "muon"


class Step(NamedTuple):
    grad_norm: float
    updates: dict[str, Tensor]
    """For each parameter: after one step less before."""
    momenta: int = 0
    """Numbers of momentum that this rank keeps."""


def groups_of(model: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    matrices = {module.weight for module in model.modules() if isinstance(module, nn.Linear)}
    for p in model.parameters():
        vars(p)["use_muon"] = p in matrices
    by_muon, others = ([p for p in model.parameters() if (p in matrices) is choice] for choice in (True, False))
    common = {"lr": LR, "weight_decay": 0.0}
    return {"params": by_muon, "momentum": 0.95, **common}, {
        "params": others,
        "betas": (0.9, 0.95),
        "eps": 1e-4,
        **common,
    }


def step_of_deepspeed(stage: int, grad_clip: float) -> Step:
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    layout = ParallelConfig(zero_stage=stage)  # pyright: ignore[reportArgumentType]
    mesh = build_mesh(start_world("cpu"), layout)
    model = parallelize(build_model(), mesh)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    by_muon, others = groups_of(model)
    optimizer = MuonWithAuxAdam([{**by_muon, "use_muon": True, "ns_method": "standard"}, {**others, "use_muon": False}])
    rows = micro_batch_size(mesh)
    engine = zero.build_engine(
        model, optimizer, mesh, layout, micro_batch_size=rows, accumulation=BATCH // (mesh.data.size * rows),
        grad_clip=grad_clip, bfloat16=False,
    )  # fmt: skip
    ((_, norm),) = train_steps(engine, "muon", range(1))
    updates = {name: weight - before[name] for name, weight in engine.full_weights()}
    states = engine._engine.optimizer.optimizer.state.values()
    return Step(norm, updates, sum(state["momentum_buffer"].numel() for state in states if "momentum_buffer" in state))


def step_of_torch(grad_clip: float) -> Step:
    model = build_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    by_muon, others = groups_of(model)
    tokens, labels = global_batch(0)
    model(tokens, labels=labels).loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), grad_clip or float("inf")).item()
    for optimizer in (torch.optim.Muon([by_muon]), torch.optim.AdamW([others])):
        optimizer.step()
    return Step(norm, {name: p.detach() - before[name] for name, p in model.named_parameters()})


def error(ours: Step, theirs: Step, kind: str) -> float:
    """‖difference‖ / ‖update of torch‖ over all matrices or all others."""
    names = [name for name in theirs.updates if name.endswith("_proj.weight") == (kind == "matrices")]
    difference, whole = (
        torch.cat([x.flatten() for x in tensors]).norm()
        for tensors in (
            [ours.updates[name] - theirs.updates[name] for name in names],
            [theirs.updates[name] for name in names],
        )
    )
    return float(difference / whole)


@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeed_clips_updates_and_keeps_no_whole_momentum(stage: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # its Newton–Schulz would be compiled
    matrices = sum(x.numel() for name, x in build_model().named_parameters() if name.endswith("_proj.weight"))
    for grad_clip in (0.0, GRAD_CLIP):
        theirs = step_of_torch(grad_clip)
        first, second = run_on_ranks(partial(step_of_deepspeed, stage, grad_clip), 2)
        errors = {kind: error(first, theirs, kind) for kind in ("matrices", "others")}
        print(
            f"stage {stage}, clipping {grad_clip}: gradient norm {first.grad_norm:.2f}, torch {theirs.grad_norm:.2f}; "
            f"errors of updates {errors}; momenta {first.momenta:,} and {second.momenta:,} of {matrices:,} numbers"
        )
        # The norm is that of the orthogonalized updates, and clipping divides them by it.
        assert first.grad_norm > 10 * theirs.grad_norm
        assert (errors["matrices"] > 0.5) == (errors["others"] > 0.5) == (grad_clip > 0)
        # A matrix on two ranks has a whole momentum on both, so momenta are not at the places of their weights.
        assert first.momenta + second.momenta > matrices
