"""Muon for the matrices of the blocks, and AdamW for all other parameters."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tost_lm.optim import adamw
from tost_lm.optim.interface import OptimizerSpec
from tost_lm.optim.settings import OptimConfig

MOMENTUM, NEWTON_SCHULZ_STEPS, COEFFICIENTS, NORM_FLOOR = 0.95, 5, (3.4445, -4.7750, 2.0315), 1e-7
"""The defaults of torch.optim.Muon."""


class Muon(OptimizerSpec):
    description = "Muon for the matrices of blocks, AdamW for the rest"
    matrix_bytes = 4  # one momentum
    other_bytes, bandwidth = adamw.OPTIMIZER.other_bytes, adamw.OPTIMIZER.bandwidth

    def build(self, model: Any, config: OptimConfig) -> Any:
        return MuonWithAdamW(model, config)

    def obstacle(self, tensor: int, zero_stage: int) -> str | None:
        for setting, found, needed in (("tensor", tensor, 1), ("zero_stage", zero_stage, 0)):
            if found != needed:
                return (
                    f'optim.kind "muon" needs whole matrices and gradients on each rank, and parallel.{setting} '
                    f'{found} divides them: set parallel.{setting} = {needed} or optim.kind = "adamw"'
                )
        return None

    def matrix_flops(self, rows: int, columns: int) -> float:
        """An iteration multiplies r × c by c × r, r × r by r × r and r × r by r × c."""
        r, c = sorted((rows, columns))
        return NEWTON_SCHULZ_STEPS * (4.0 * r * r * c + 2 * r**3)


OPTIMIZER = Muon()


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the weights of linear layers, and torch.optim.AdamW for all other parameters.

    An update of Muon has the RMS of a usual one of AdamW (0.2 · lr), so both use the same learning rate and weight
    decay. It is that of torch.optim.Muon, which orthogonalizes in bfloat16, but on a CPU in the dtype of the matrix: of
    CPUs, most compute bfloat16 products 3 to 17 times slower than float32 (128 × 128 to 512 × 128).
    """

    def __init__(self, model: nn.Module, config: OptimConfig) -> None:
        self.matrices = {module.weight for module in model.modules() if isinstance(module, nn.Linear)}
        """The matrices that Muon updates. Embedding, head and positions are no linear layers."""
        groups = adamw.parameter_groups(model, config.weight_decay)
        by_muon = [p for group in groups for p in group["params"] if p in self.matrices]
        others = [{**group, "params": [p for p in group["params"] if p not in self.matrices]} for group in groups]
        self._adamw = adamw.adamw_of(others, config)
        muon = {"params": by_muon, "lr": config.lr, "weight_decay": config.weight_decay}
        super().__init__([muon, *self._adamw.param_groups], {})  # AdamW's are shared
        self._adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None
        lr, decay = self.param_groups[0]["lr"], self.param_groups[0]["weight_decay"]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                if not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
                momentum = self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - MOMENTUM)
                update = orthogonalized(p.grad.lerp(momentum, MOMENTUM))  # Nesterov's
                p.mul_(1 - lr * decay).add_(update, alpha=-lr * (0.2 * math.sqrt(max(p.shape))))
        self._adamw.step()

    def statistics_of(self, parameter: Tensor) -> tuple[str, ...]:
        """Names of the tensors that `state` keeps of a parameter."""
        return ("momentum_buffer",) if parameter in self.matrices else ("exp_avg", "exp_avg_sq")


def orthogonalized(x_rc: Tensor) -> Tensor:
    """Nearly U Vᵀ of the singular value decomposition U S Vᵀ, by a polynomial that sends singular values to about 1."""
    x_RC = x_rc if x_rc.is_cpu else x_rc.bfloat16()
    x_RC = x_RC.mT if x_RC.shape[0] > x_RC.shape[1] else x_RC  # the smaller gram matrix
    x_RC = x_RC / x_RC.norm().clamp(min=NORM_FLOOR)
    a, b, c = COEFFICIENTS
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram_RR = x_RC @ x_RC.mT
        x_RC = torch.addmm(x_RC, torch.addmm(gram_RR, gram_RR, gram_RR, beta=b, alpha=c), x_RC, beta=a)
    return x_RC.mT if x_rc.shape[0] > x_rc.shape[1] else x_RC
