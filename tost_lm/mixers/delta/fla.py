"""The gated delta rule by the kernels of flash-linear-attention (package fla-core), for CUDA tensors."""

from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from tost_lm.ops.layout import LocalDocuments, int64_tensor

LARGEST_KEY = 256
RECURRENT_TOKENS = 64
"""Tokens of a document up to which the recurrent kernel is used, where no gradient is needed."""


def obstacle(key: Tensor, value: Tensor) -> str | None:
    """The reason why the kernels are not used, or None."""
    if not value.is_cuda:
        return f"values are on {value.device}, but the kernels run on CUDA devices"
    if value.dtype not in (torch.bfloat16, torch.float16):
        return f"values are {value.dtype}, but the kernels round products to TF32"
    if key.shape[-1] > LARGEST_KEY:
        return f"keys have {key.shape[-1]} channels, but the kernels support up to {LARGEST_KEY}"
    return missing_on(value.device)


def missing_on(device: torch.device) -> str | None:
    """The reason why no call on this CUDA device uses the kernels, or None."""
    return _miscompiled_on(device) if find_spec("fla") else "the package fla-core is not installed"


@cache
def _miscompiled_on(device: torch.device) -> str | None:
    """The backward pass of fla-core refuses to run there: github.com/fla-org/flash-linear-attention/issues/640."""
    is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] == 9
    if is_hopper and not find_spec("tilelang") and TorchVersion("3.4.0") <= TorchVersion(version("triton")) < "3.7.1":
        return "triton 3.4 to 3.7.0 miscompiles fla-core's kernels for Hopper GPUs; install torch>=2.12.1 or tilelang"
    return None


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, initial: Tensor, local: LocalDocuments
) -> tuple[Tensor, Tensor]:
    """y [B, T, H, V] and the final state [N, H, K, V] in the dtype of `initial`; the kernels' states are float32.

    Queries and keys are rounded to the dtype of the values.
    """
    from fla.ops import gated_delta_rule as kernels  # an optional package, and slow to import

    inputs = query, key, value, log_decay, beta, initial
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    recurrent = not needs_gradient and max(local.lengths) <= RECURRENT_TOKENS
    kernel: Any = kernels.fused_recurrent_gated_delta_rule if recurrent else kernels.chunk_gated_delta_rule
    offsets = {"cu_seqlens": int64_tensor(local.offsets, value.device)} if local.packed else {}
    if local.packed and not recurrent:  # read on the CPU, without synchronization
        offsets["cu_seqlens_cpu"] = int64_tensor(local.offsets, torch.device("cpu"))
    y, final = kernel(
        q=query.to(value.dtype).contiguous(),
        k=key.to(value.dtype).contiguous(),
        v=value.contiguous(),
        g=log_decay.float().contiguous(),
        beta=beta.float().contiguous(),
        scale=1.0,
        initial_state=initial.float().contiguous(),
        output_final_state=True,
        **offsets,
    )
    return y, final.to(initial.dtype)
