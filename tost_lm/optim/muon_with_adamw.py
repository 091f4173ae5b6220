"""torch's Muon and AdamW as one optimizer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tost_lm.optim.adamw import adamw_of, parameter_groups
from tost_lm.optim.settings import OptimConfig


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
        groups = parameter_groups(model, config.weight_decay)
        muon = torch.optim.Muon(
            [p for group in groups for p in group["params"] if p in self.matrices],
            lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw",
        )  # fmt: skip
        others = [{**group, "params": [p for p in group["params"] if p not in self.matrices]} for group in groups]
        self._optimizers = (muon, adamw_of(others, config))
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
