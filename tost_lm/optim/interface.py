"""The interface of an optimizer, which settings, the resource plan and model cards read. It needs no torch."""

from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any

from tost_lm.optim.settings import OptimConfig


class OptimizerSpec(ABC):
    """Everything that the rest of the package asks of an optimizer."""

    description: str
    """In model cards."""
    matrix_bytes: int
    """Bytes of state for each number of a linear layer's weight."""
    other_bytes: int
    """Bytes of state for each other parameter."""
    bandwidth: float
    """Fraction of a copy's bandwidth at which an update reads and writes weights, gradients and state."""

    @abstractmethod
    def build(self, model: Any, config: OptimConfig) -> Any:
        """The `torch.optim.Optimizer` of a module's parameters. If it keeps other tensors than AdamW does, it has a
        method `statistics_of(parameter)`, which returns their names; they are float32 and of the parameter's shape."""

    def obstacle(self, tensor: int, zero_stage: int) -> str | None:
        """Why it cannot run with these settings of [parallel], with the fix; None: it can."""
        return None

    def matrix_flops(self, rows: int, columns: int) -> float:
        """FLOPs of the matrix products in the update of a linear layer's weight."""
        return 0.0

    def state_bytes(self, parameters: float, in_matrices: float) -> float:
        """Bytes of state of so many parameters, of which `in_matrices` are in weights of linear layers."""
        return self.other_bytes * parameters + (self.matrix_bytes - self.other_bytes) * in_matrices


def optimizer_of(config: OptimConfig) -> OptimizerSpec:
    """The optimizer of `optim.kind`, which is the name of its module."""
    return import_module(f"tost_lm.optim.{config.kind}").OPTIMIZER


def statistics_of(optimizer: Any, parameter: Any) -> tuple[str, ...]:
    """Names of the tensors that a `torch.optim.Optimizer` keeps of a parameter, float32 and of its shape."""
    of_others = getattr(optimizer, "statistics_of", None)
    return of_others(parameter) if of_others else ("exp_avg", "exp_avg_sq")
