"""AdamW for a model."""

import torch
from torch import nn

from tost_lm.optim.config import OptimConfig


def build_adamw(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    return adamw_of(parameter_groups(model, config.weight_decay), config)


def adamw_of(groups: list[dict], config: OptimConfig) -> torch.optim.AdamW:
    """AdamW of parameter groups that have their weight decay."""
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups: with weight decay, and without (1-D tensors and denom_bias)."""
    decayed, others = [], []
    for name, parameter in model.named_parameters():
        # denom_bias may have two dimensions, [heads, positions].
        (others if parameter.dim() < 2 or name.endswith(".denom_bias") else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
