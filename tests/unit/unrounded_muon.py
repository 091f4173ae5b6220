"""torch.optim.Muon without its rounding to bfloat16."""

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode


class UnroundedOnCPU(TorchFunctionMode):
    """In this context it orthogonalizes CPU matrices in their own dtype."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.bfloat16 and args[0].is_cpu:
            return args[0].clone()
        return func(*args, **(kwargs or {}))
