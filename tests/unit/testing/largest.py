"""The largest tensor that operations write."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """The most numbers of a tensor that an operation returns, but of views and `scatter_`, which returns all that it
    writes to."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func is not torch.ops.aten.scatter_.src:
            self.numbers = max([self.numbers, *(x.numel() for x in tree_leaves(result) if isinstance(x, Tensor))])
        return result
