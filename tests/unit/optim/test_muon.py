"""Which parameters Muon updates, that both optimizers are torch's, and what any optimizer keeps."""

from typing import get_args

import pytest
import torch
from unrounded_muon import UnroundedOnCPU

from tost_lm.config import validate
from tost_lm.model import ModelConfig, TostLM
from tost_lm.optim.interface import optimizer_of, statistics_of
from tost_lm.optim.settings import OptimConfig

SHAPE = {"layers": 3, "heads": 2, "width": 8, "vocab_size": 11, "max_positions": 6, "bias": True, "tied_head": False}
BY_MUON = {
    f"blocks.{n}.{part}.{matrix}.weight"
    for n in range(3)
    for part in ("mixer", "mlp")
    for matrix in ("in_proj", "out_proj")
}


def build_model() -> TostLM:
    torch.manual_seed(0)
    # T layers have matrices of another kind: denom_bias by position; S layers: norm.
    return TostLM(validate(ModelConfig, {**SHAPE, "pattern": "TDA", "tssa": {"denom_bias": "position"}}, "test"))


def draw_gradients(model: TostLM, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def test_both_optimizers_are_torchs_and_follow_one_learning_rate():
    ours, theirs = build_model(), build_model()
    config = OptimConfig(kind="muon", weight_decay=0.2, beta1=0.8, beta2=0.9)
    optimizer = optimizer_of(config).build(ours, config)
    named = dict(theirs.named_parameters())
    decayed = [p for name, p in named.items() if p.dim() > 1 and name not in BY_MUON and "denom_bias" not in name]
    others = [p for name, p in named.items() if p.dim() < 2 or "denom_bias" in name]
    muon = torch.optim.Muon([named[name] for name in BY_MUON], weight_decay=0.2, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": decayed, "weight_decay": 0.2}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=(0.8, 0.9), fused=True)
    for step in range(3):
        for group in [*optimizer.param_groups, *muon.param_groups, *adamw.param_groups]:
            group["lr"] = 0.1 / (1 + step)
        for model in (ours, theirs):
            draw_gradients(model, step)
        with UnroundedOnCPU():
            muon.step()
        adamw.step()
        optimizer.step()
    for name, p in ours.named_parameters():
        assert torch.equal(p, named[name]), name
        assert statistics_of(optimizer, p) == (("momentum_buffer",) if name in BY_MUON else ("exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize("kind", get_args(OptimConfig.model_fields["kind"].annotation))
def test_the_state_of_an_optimizer_has_the_stated_names_and_bytes(kind: str):
    model, config = build_model(), validate(OptimConfig, {"kind": kind}, "test")
    draw_gradients(model, 0)
    spec = optimizer_of(config)
    optimizer = spec.build(model, config)
    optimizer.step()
    kept = {p: {key: value for key, value in optimizer.state[p].items() if value.dim()} for p in model.parameters()}
    assert all(of.keys() == {*statistics_of(optimizer, p)} for p, of in kept.items())
    numbers = sum(p.numel() for p in kept), sum(p.numel() for n, p in model.named_parameters() if n in BY_MUON)
    assert sum(value.nbytes for of in kept.values() for value in of.values()) == spec.state_bytes(*numbers)
