"""The gated delta rule by the kernels of flash-linear-attention (package fla-core), for CUDA tensors.

With Triton 3.4 to 3.7.0 on Hopper GPUs, fla-core refuses the backward pass, because Triton miscompiles the kernel for
blocks of 64 channels of keys (github.com/fla-org/flash-linear-attention/issues/640). Keys of up to 32 and of more than
64 channels have other blocks. They are allowed where their gradients equal those of PyTorch.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.torch_version import TorchVersion

from tost_lm.mixers.delta import chunked
from tost_lm.mixers.delta.settings import DeltaSizes
from tost_lm.ops.backends import HALF_PRECISION, not_installed, obstacle_to_kernels
from tost_lm.ops.layout import LocalDocuments, fla_documents
from tost_lm.ops.precision import running_dtype

LARGEST_KEY = 256
RECURRENT_TOKENS = 64
"""Tokens of a document up to which the recurrent kernel is used, where no gradient is needed."""


TESTED_TOKENS, LARGEST_ERROR = 2048, 0.05
"""In the comparison of gradients. The tokens fill a GPU, since fla-core chooses kernels by their times in this call.
Relative errors of bfloat16 are below 0.02, those of wrong kernels 0.5."""


def obstacle(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, initial: Tensor | None,
    local: LocalDocuments, with_final: bool = True,
) -> str | None:  # fmt: skip
    """The reason why the kernels cannot run this call of `delta_rule`, or None."""
    if key.shape[-1] > LARGEST_KEY:
        return f"keys have {key.shape[-1]} channels, but its kernels support up to {LARGEST_KEY}"
    found = obstacle_to_kernels(value, HALF_PRECISION, "fla-core")  # of other dtypes, they round products to TF32
    if found or not needs_gradient(query, key, value, log_decay, beta, initial):
        return found
    sizes = DeltaSizes(key.shape[-2], value.shape[-2], key.shape[-1], value.shape[-1])
    return missing_in_training(value.device, sizes, log_decay.dim() == 4)


@cache
def missing_in_training(device: torch.device, sizes: DeltaSizes, of_channels: bool = False) -> str | None:
    """The reason why no training on this CUDA device uses the kernels, or None. The first call may compile them.

    Those of decays of channels have no guard, and no GPU has run them here: their gradients are always compared.
    """
    if missing := not_installed("fla-core"):
        return missing
    if not of_channels:
        if not _guards_backward(device):
            return None
        if 32 < sizes.key_size <= 64:
            return (
                "triton 3.4 to 3.7.0 miscompiles fla-core's kernels of keys of 33 to 64 channels, here "
                f"{sizes.key_size}, for Hopper GPUs; install torch>=2.12.1 or tilelang, or choose another "
                "model.delta.qk_size"
            )
    error = gradient_error(device, sizes, of_channels)
    if error > LARGEST_ERROR:
        other = "another version of fla-core" if of_channels else "torch>=2.12.1"
        return f"fla-core's kernels have relative errors of {error:.2g} in gradients here; install {other}"
    return None


@cache
def _guards_backward(device: torch.device) -> bool:
    is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] == 9
    affected = TorchVersion("3.4.0") <= TorchVersion(version("triton")) < "3.7.1"
    return is_hopper and affected and not find_spec("tilelang")


@cache
def _chunks_without_guard() -> Callable[..., tuple[Tensor, Tensor]]:
    """fla-core's `chunk_gated_delta_rule` with the backward pass that it refuses."""
    from fla.ops.gated_delta_rule import chunk

    chunk_o: Any = import_module("fla.ops.common.chunk_o")
    guarded: Any = chunk.ChunkGatedDeltaRuleFunction
    _, *parameters = signature(guarded.forward).parameters.values()

    class WithoutGuard(guarded):
        @staticmethod
        def backward(ctx, *gradients: Tensor) -> Any:
            before, chunk_o.TRITON_ABOVE_3_7_1 = chunk_o.TRITON_ABOVE_3_7_1, True
            try:
                return guarded.backward(ctx, *gradients)
            finally:
                chunk_o.TRITON_ABOVE_3_7_1 = before

    return lambda **arguments: WithoutGuard.apply(*(arguments.get(one.name, one.default) for one in parameters))


def gradient_error(device: torch.device, sizes: DeltaSizes, of_channels: bool = False) -> float:
    """The largest relative error, by norm, of the gradients of the kernels against PyTorch.

    With the layer's own heads: Triton compiles the kernels for each number of heads, in minutes.
    """
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(device, torch.bfloat16)
    M, (h, H, K, V) = TESTED_TOKENS, sizes
    keys = [torch.nn.functional.normalize(draw(1, M, h, K), dim=-1) for _ in "qk"]
    gates = [-draw(1, M, H, *[K] * of_channels).abs().float(), draw(1, M, H).float().sigmoid()]
    inputs = [*keys, draw(1, M, H, V), *gates, draw(2, H, K, V).float()]
    weights = draw(1, M, H, V), draw(2, H, K, V).float()
    local = LocalDocuments.of(torch.tensor([0, 70, M]), 1, M, None)

    def gradients(rule: Callable[..., tuple[Tensor, Any]], dtype: torch.dtype | None) -> Sequence[Tensor]:
        leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
        with torch.enable_grad():
            y, final = rule(*leaves, local)
        return torch.autograd.grad([y, final], leaves, [w.to(x) for w, x in zip(weights, (y, final), strict=True)])

    pairs = zip(gradients(delta_rule, None), gradients(chunked.delta_rule, torch.float32), strict=True)
    return max(float(vector_norm(a.float() - b) / vector_norm(b)) for a, b in pairs)


def needs_gradient(*inputs: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, initial: Tensor | None,
    local: LocalDocuments, with_final: bool = True,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """y [B, T, H, V] and, if wanted, the final state [N, H, K, V] in the dtype of running sums; the kernels' states are
    float32. Without `initial` documents start empty.

    Queries and keys are rounded to the dtype of the values.
    """
    from fla.ops import gated_delta_rule, kda  # an optional package, and slow to import

    recurrent = (
        not needs_gradient(query, key, value, log_decay, beta, initial) and max(local.lengths) <= RECURRENT_TOKENS
    )
    documents = dict(fla_documents(local.offsets, value.device)) if local.packed else {}
    if log_decay.dim() == 4:
        kernel: Any = kda.fused_recurrent_kda if recurrent else kda.chunk_kda
        if documents:  # from these the kernels compute the indices of chunks, without a copy from the device
            documents = {"cu_seqlens": documents["cu_seqlens"], "cu_seqlens_cpu": torch.tensor(local.offsets)}
    elif recurrent:
        kernel = gated_delta_rule.fused_recurrent_gated_delta_rule
        documents.pop("chunk_indices", None)
    elif _guards_backward(value.device):
        kernel = _chunks_without_guard()
    else:
        kernel = gated_delta_rule.chunk_gated_delta_rule
    y, final = kernel(
        q=query.to(value.dtype).contiguous(),
        k=key.to(value.dtype).contiguous(),
        v=value.contiguous(),
        g=log_decay.float().contiguous(),
        beta=beta.float().contiguous(),
        scale=1.0,
        initial_state=None if initial is None else initial.float().contiguous(),
        output_final_state=with_final,
        **documents,
    )
    return y, final.to(running_dtype(y.device)) if with_final else None
