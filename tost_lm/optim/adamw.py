"""AdamW, with weight decay on matrices only."""

from typing import Any

from tost_lm.optim.interface import OptimizerSpec
from tost_lm.optim.settings import OptimConfig


class AdamW(OptimizerSpec):
    description = "AdamW"
    matrix_bytes = other_bytes = 8  # two moments
    bandwidth = 0.82  # the 7 kernels of the step with 1 × 8,192 tokens

    def build(self, model: Any, config: OptimConfig) -> Any:
        return adamw_of(parameter_groups(model, config.weight_decay), config)


OPTIMIZER = AdamW()


def adamw_of(groups: list[dict], config: OptimConfig) -> Any:
    """`torch.optim.AdamW` of parameter groups that have their weight decay."""
    import torch

    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)


def parameter_groups(model: Any, weight_decay: float) -> list[dict]:
    """Two groups of a module's parameters: with weight decay, and without (1-D tensors and denom_bias).

    DeepSpeed puts the parameters of a group one behind the other into a buffer, where GPUs load 16 bytes at a time from
    multiples of 16 bytes. So those of 8·n elements, which are all large ones, come first in each group.
    """
    decayed, others = [], []
    for name, parameter in model.named_parameters():
        # denom_bias may have two dimensions, [heads, positions].
        (others if parameter.dim() < 2 or name.endswith(".denom_bias") else decayed).append(parameter)
    for group in (decayed, others):
        group.sort(key=lambda parameter: parameter.numel() % 8 > 0)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
