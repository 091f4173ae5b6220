"""Every parallel layout trains as one process does, in float32."""

from functools import partial
from typing import Any

import pytest
import torch
from other_forms import OTHER_FORMS
from torch import Tensor
from training_on_layouts import LR, Record, T, build_model, layout_of, train_in_stages, train_on_layout
from unrounded_muon import UnroundedOnCPU

from tost_lm.parallel.settings import ParallelConfig
from tost_lm.testing import run_on_ranks

GRAD_CLIP = 0.5
DELTA = {"pattern": "TDA"}
AXES = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]
"""Tensor and sequence ranks; the rest of four are data ranks."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensor", "sequence", "stages", "optimizer", "model"),
    [
        pytest.param(1, 2, (0, 2), "sgd", DELTA, marks=pytest.mark.quick),
        (2, 2, (1, 3), "adamw", DELTA),
        (1, 2, (1, 2, 3), "adamw", {"shard_ranks": 2}),
        (2, 1, (1, 2, 3), "sgd", {**OTHER_FORMS, "z_loss": 0.1}),
        *((*axes, (0, 1, 2, 3), optimizer, {}) for axes in AXES for optimizer in ("sgd", "adamw")),
    ],
)
def test_four_ranks_train_as_one_process(
    tensor: int, sequence: int, stages: tuple[int, ...], optimizer: str, model: dict[str, Any]
):
    of_layout = {"shard_ranks"} & {*model}
    layout = {"tensor": tensor, "sequence": sequence, **{name: model[name] for name in of_layout}}
    model = {name: value for name, value in model.items() if name not in of_layout}
    run = partial(train_in_stages, **model)
    for records in run_on_ranks(run, 4, layout, stages, optimizer, GRAD_CLIP, timeout_s=280):
        for record in records:
            record.assert_as_one_process(optimizer, GRAD_CLIP, **model)


@pytest.mark.slow
def test_offloading_changes_nothing():
    layout = {"sequence": 2, "offload": "optimizer"}
    for record in run_on_ranks(train_in_stages, 2, layout, (2, 3), "adamw", GRAD_CLIP)[0]:
        record.assert_as_one_process("adamw", GRAD_CLIP)


def train_with_muon_and_with_torch() -> list[tuple[str, Tensor, Tensor]]:
    """(name, weight, the weight that torch's optimizers make of the gradients of all ranks) for each parameter."""
    layout = ParallelConfig(sequence=2, zero_stage=0)
    record = train_on_layout(layout, "muon", grad_clip=0.0)
    named = dict(build_model().named_parameters())
    by_muon = [p for name, p in named.items() if name.endswith("_proj.weight")]
    decayed = [named[name] for name in ("embedding.weight", "positions.weight", "blocks.1.mixer.conv")]
    others = [p for p in named.values() if not any(p is other for other in [*by_muon, *decayed])]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizers = (
        torch.optim.Muon(by_muon, lr=LR["muon"], weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=LR["muon"], betas=(0.9, 0.95), eps=1e-4, fused=True),
    )
    for gradients in record.gradients:
        for name, gradient in gradients.items():
            named[name].grad = gradient
        with UnroundedOnCPU():
            for optimizer in optimizers:
                optimizer.step()
    return [(name, record.weights[name], p.detach()) for name, p in named.items()]


@pytest.mark.quick
def test_muon_on_data_and_sequence_ranks_is_torchs_to_the_bit():
    for weights in run_on_ranks(train_with_muon_and_with_torch, 4):
        for name, ours, theirs in weights:
            assert torch.equal(ours, theirs), name


def train_on_uneven_shards(lengths: tuple[int, ...]) -> Record:
    return train_on_layout(ParallelConfig(sequence=4, zero_stage=2), "sgd", 0.0, lengths=lengths)


def test_shards_of_unequal_length_without_clipping():
    lengths = (5, 1, 13, 7)
    assert sum(lengths) == T
    run_on_ranks(train_on_uneven_shards, 4, lengths)[0].assert_as_one_process("sgd", 0.0)


def norms_of_layouts(layouts: list[dict[str, Any]], bfloat16: bool) -> list[tuple[float, float]]:
    """The norm of the first gradient under each layout, and the same norm in float64. Float32 has errors of 1e-5."""
    found = []
    model: dict[str, Any] = {"width": 128, "vocab_size": 4096, "layers": 2, "pattern": "TA", "bfloat16": bfloat16}
    for layout in layouts:
        record = train_on_layout(layout_of(**layout), "sgd", GRAD_CLIP, 1, **model)
        exact = sum(float(gradient.double().square().sum()) for gradient in record.gradients[0].values()) ** 0.5
        found.append((record.norms[0], exact))
    return found


@pytest.mark.slow
def test_gradient_norms_are_sums_in_float64_under_every_layout():
    stages: list[dict[str, Any]] = [{"zero_stage": stage} for stage in range(4)]
    tensor, sequence = ({axis: 2} for axis in ("tensor", "sequence"))
    [alone] = run_on_ranks(norms_of_layouts, 1, stages[:1], False)
    on_two = run_on_ranks(norms_of_layouts, 2, [*stages, {"zero_stage": 0, **tensor}, sequence], False)
    in_bfloat16 = run_on_ranks(norms_of_layouts, 2, [*stages[1:], tensor], True)
    for norm, exact in [*alone, *on_two[0], *on_two[1], *in_bfloat16[0], *in_bfloat16[1]]:
        assert norm == pytest.approx(exact, rel=1e-6)
    assert [norm for norm, _ in on_two[0]] == pytest.approx([alone[0][0]] * len(on_two[0]), rel=1e-6)
