"""Delta layers of transformers, run in PyTorch, in float64 too."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tost_lm.inference.hugging_face import torch_forms


@contextmanager
def run_in_torch(module: ModuleType, dtype: torch.dtype) -> Iterator[None]:
    """The layers of `module` run in PyTorch, and for float64 they use float64 where they name float32."""
    with pytest.MonkeyPatch.context() as patch:
        for name, function in torch_forms(module).items():
            patch.setattr(module, name, function)
        if dtype == torch.float64:
            patch.setattr(module, "torch", Float64())
            patch.setattr(Tensor, "float", Tensor.double)
        yield


class Float64:
    """torch, with another float32."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
