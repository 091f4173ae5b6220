"""The learning rate of each step, and which parameters decay."""

import math

import pytest
import torch

from tost_lm.config import validate
from tost_lm.model import ModelConfig, TostLM
from tost_lm.optim.adamw import build_adamw, learning_rate, warmup_steps
from tost_lm.optim.config import OptimConfig

CONFIG = OptimConfig(lr=1.0, min_lr=0.1, warmup_steps=4)


def test_rate_rises_linearly_then_falls_as_half_a_cosine_to_its_end():
    rates = [learning_rate(step, 15, CONFIG) for step in range(15)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[9] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi / 2)))
    assert rates[-1] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_warm_up_follows_from_the_length_of_the_run_unless_it_is_set():
    assert [warmup_steps(OptimConfig(), steps) for steps in (5, 160, 600_000)] == [0, 16, 2000]
    assert warmup_steps(OptimConfig(warmup_steps=300), 160) == 300


def test_warm_up_from_zero_is_nanogpts_schedule():
    def nanogpt(step: int, warmup: int = 20, last: int = 100) -> float:
        if step < warmup:
            return 6e-4 * step / warmup
        return 6e-5 + 0.5 * (1 + math.cos(math.pi * (step - warmup) / (last - warmup))) * (6e-4 - 6e-5)

    config = OptimConfig(warmup_steps=20, warmup_from_zero=True)
    assert [learning_rate(step, 101, config) for step in range(101)] == pytest.approx([nanogpt(s) for s in range(101)])


def test_only_matrices_decay():
    settings = {"layers": 1, "heads": 2, "width": 8, "vocab_size": 11, "max_positions": 6, "bias": True}
    model = TostLM(validate(ModelConfig, settings, "test"))
    for p in model.parameters():
        torch.nn.init.ones_(p)
        p.grad = torch.zeros_like(p)
    build_adamw(model, OptimConfig(lr=0.5, weight_decay=0.1)).step()
    decayed = {name for name, p in model.named_parameters() if (p != 1).all()}
    kept = {name for name, p in model.named_parameters() if (p == 1).all()}
    assert decayed == {name for name, p in model.named_parameters() if p.dim() == 2 and "denom_bias" not in name}
    assert decayed | kept == {name for name, _ in model.named_parameters()}
