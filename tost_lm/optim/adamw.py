"""AdamW for a model, and its learning-rate schedule."""

import math

import torch
from torch import nn

from tost_lm.optim.config import OptimConfig


def build_adamw(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    return torch.optim.AdamW(
        parameter_groups(model, config.weight_decay), lr=config.lr, betas=(config.beta1, config.beta2), fused=True
    )


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups: with weight decay, and without (1-D tensors and denom_bias)."""
    decayed, others = [], []
    for name, parameter in model.named_parameters():
        # denom_bias may have two dimensions, [heads, positions].
        (others if parameter.dim() < 2 or name.endswith(".denom_bias") else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def warmup_steps(config: OptimConfig, steps: int) -> int:
    """Warm-up steps of a run of `steps` steps."""
    return min(2000, steps // 10) if config.warmup_steps is None else config.warmup_steps


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """Learning rate of step `step` (from 0): linear warm-up to `lr`, then cosine decay to `min_lr`."""
    warmup = warmup_steps(config, steps)
    if step < warmup:
        return config.lr * (step / warmup if config.warmup_from_zero else (step + 1) / (warmup + 1))
    done = (step - warmup) / max(1, steps - 1 - warmup)
    return config.min_lr + 0.5 * (1 + math.cos(math.pi * min(done, 1.0))) * (config.lr - config.min_lr)
