"""AdamW over a model's parameters, and the learning rate of each step."""

import math

import torch
from torch import nn

from tost_lm.optim.config import OptimConfig


def build_adamw(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only, fused where the device allows it."""
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(
        parameter_groups(model, config.weight_decay), lr=config.lr, betas=(config.beta1, config.beta2), fused=fused
    )


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups: decayed, and not (1-D tensors, temp and denom_bias)."""
    decayed, kept = [], []
    for name, parameter in model.named_parameters():
        # denom_bias is a matrix [heads, positions] and yet a bias.
        (kept if parameter.dim() < 2 or name.endswith(".denom_bias") else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """The rate of 0-based `step` of `steps`: linear to `lr`, then a half cosine down to `min_lr`."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    done = (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps)
    return config.min_lr + 0.5 * (1 + math.cos(math.pi * min(done, 1.0))) * (config.lr - config.min_lr)
