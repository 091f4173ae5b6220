"""Muon for the matrices of the blocks, and AdamW for all other parameters."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tost_lm.optim import adamw
from tost_lm.optim.interface import OptimizerSpec
from tost_lm.optim.settings import OptimConfig

NEWTON_SCHULZ_STEPS = 5  # torch's default


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


class UnroundedOnCPU(TorchFunctionMode):
    """In this context, torch.optim.Muon orthogonalizes CPU matrices in their own dtype. Its bfloat16 is meant for GPUs:
    of CPUs, most compute bfloat16 products 3 to 17 times slower than float32 (128 × 128 to 512 × 128)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.bfloat16 and args[0].is_cpu:
            return args[0].clone()
        return func(*args, **(kwargs or {}))


class MuonWithAdamW(torch.optim.Optimizer):
    """torch.optim.Muon for the weights of linear layers, and torch.optim.AdamW for all other parameters.

    Both share `param_groups` and `state` with this optimizer. An update of Muon has the RMS of a usual one of AdamW
    (0.2 · lr), so both use the same learning rate and weight decay.
    """

    def __init__(self, model: nn.Module, config: OptimConfig) -> None:
        self.matrices = {module.weight for module in model.modules() if isinstance(module, nn.Linear)}
        """The matrices that Muon updates. Embedding, head and positions are no linear layers."""
        groups = adamw.parameter_groups(model, config.weight_decay)
        muon = torch.optim.Muon(
            [p for group in groups for p in group["params"] if p in self.matrices],
            lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw",
        )  # fmt: skip
        others = [{**group, "params": [p for p in group["params"] if p not in self.matrices]} for group in groups]
        self._optimizers = (muon, adamw.adamw_of(others, config))
        super().__init__([group for optimizer in self._optimizers for group in optimizer.param_groups], {})
        for optimizer in self._optimizers:
            optimizer.state = self.state

    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None
        with UnroundedOnCPU():
            for optimizer in self._optimizers:
                optimizer.step()

    def statistics_of(self, parameter: Tensor) -> tuple[str, ...]:
        """Names of the tensors that `state` keeps of a parameter."""
        return ("momentum_buffer",) if parameter in self.matrices else ("exp_avg", "exp_avg_sq")
