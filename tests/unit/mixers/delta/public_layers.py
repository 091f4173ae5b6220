"""Delta layers of transformers: run in PyTorch, in float64 too, and their parameters under our names."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tost_lm.inference.hugging_face import torch_forms

Parameters = dict[str, Tensor]


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


def renamed(kind: str, theirs: Parameters, heads: tuple[int, int], sizes: tuple[int, int]) -> Parameters:
    """Our parameters of a layer from theirs; rows are regrouped by key heads.

    Args:
        heads: key heads h and value heads H.
        sizes: K and V.
    """
    (h, H), (K, V) = heads, sizes
    by_head = lambda x: x.unflatten(0, (h, -1))
    channels = [h * K, h * K, H * V]
    if kind == "qwen3_next":
        rows = [by_head(theirs["in_proj_qkvz.weight"]), by_head(theirs["in_proj_ba.weight"])]
    elif kind == "qwen3_5":
        qkv = theirs["in_proj_qkv.weight"].split(channels)
        rows = [by_head(x) for x in (*qkv, *(theirs[f"in_proj_{name}.weight"] for name in "zba"))]
    else:
        rows = [by_head(theirs[f"{name}_proj.weight"]) for name in "qkvgba"]
    conv = [by_head(x) for x in theirs["conv1d.weight"].squeeze(1).split(channels)]
    olmo = kind == "olmo_hybrid"
    return {
        "in_proj.weight": torch.cat(rows, 1).flatten(0, 1),
        "conv": torch.cat(conv, 1).flatten(0, 1),
        "log_rate": theirs["A_log"],
        "step_bias": theirs["dt_bias"],
        "norm": theirs["o_norm.weight" if olmo else "norm.weight"],
        "out_proj.weight": theirs["o_proj.weight" if olmo else "out_proj.weight"],
    }
