"""The gated delta rule as functions of tensors: any number of tokens with states in and out, and one token."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tost_lm.mixers.delta import chunked, fla
from tost_lm.ops.affine import affine_scan, initial_states
from tost_lm.ops.backends import Backend, choose
from tost_lm.ops.layout import LocalDocuments, SequenceShard
from tost_lm.ops.precision import running_dtype, statistics_dtype

BACKENDS = [
    Backend("fla-core", fla.obstacle, fla.delta_rule),
    Backend("chunked", None, chunked.delta_rule),
]


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    local: LocalDocuments,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    shard: SequenceShard | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Write each token to the state of its heads, and read the state, up to and including the token itself.

    Kernels of fla-core for bfloat16 and float16 values on CUDA devices, where it is installed; else PyTorch, whose sums
    and states are float32, or float64 for float64 values. Differentiable.

    Args:
        query, key: [B, T, h, K]; with H > h, each serves H / h consecutive value heads.
        value: [B, T, H, V], any floating dtype.
        log_decay: log α, [B, T, H], or of each key channel, [B, T, H, K] with H = h; at most 0. Where a
            decay may be 0, `FiniteDecay` must have been applied.
        beta: [B, T, H], between 0 and 2.
        local: the documents of these tokens; each starts empty, or from its row of `initial_state`.
        initial_state: the states of N documents, [N, H, K, V]; None: empty.
        output_final_state: return the state after the last token of each document; else None.
        shard: the tokens are a sequence shard. States and their gradients are equal on all ranks.

    Returns:
        y [B, T, H, V] in the dtype of `value`, and the final state [N, H, K, V] (float64; float32 on mps) or None.

    Raises:
        ValueError: states of another shape.
    """
    (H, V), K, N = value.shape[2:], key.shape[-1], len(local.whole_lengths)
    dtype = statistics_dtype(value)
    with torch.autocast(value.device.type, enabled=False):
        query, key, log_decay, beta = (
            x if statistics_dtype(x) == dtype else x.to(dtype) for x in (query, key, log_decay, beta)
        )
        inputs = query, key, value, log_decay, beta

        def scan(before: Tensor | None, with_final: bool = True) -> tuple[Tensor, Any]:
            call = *inputs, before, local, with_final
            return choose(BACKENDS, *call)(*call)

        if initial_state is None and shard is None:
            return scan(None, output_final_state)  # a state of zeros would be written, rounded and read
        initial = initial_states(initial_state, [N, H, K, V], like=value)

        def maps(tokens: slice, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
            key_M, value_M, log_decay_M, beta_M = (x.flatten(0, 1)[tokens] for x in inputs[1:])
            return chunked.delta_rule_maps(key_M, value_M, log_decay_M, beta_M, lengths)

        return affine_scan(scan, maps, initial, local=local, shard=shard, output_final_state=output_final_state)


def delta_rule_step(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token after those of `state`: the result of `delta_rule` for T = 1, differentiable.

    It is computed in float64 (float32 on mps). The state drifts by 2e-13 of its norm in 2²⁰ tokens where β is 2 and
    nothing decays, else by 2e-15; in float32 chunks of `delta_rule` by 2e-4 and 4e-7 (tests/full/test_delta_drift.py).

    Args:
        query, key: [N, h, K].
        value: [N, H, V].
        log_decay: [N, H] or [N, H, K].
        beta: [N, H].
        state: [N, H, K, V].

    Returns:
        y [N, H, V] in the dtype of `value`, and the state that includes the token.
    """
    running, group = running_dtype(value.device), value.shape[1] // key.shape[1]
    with torch.autocast(value.device.type, enabled=False):
        query_NHK, key_NHK = (x.to(running).repeat_interleave(group, 1) for x in (query, key))
        factor = log_decay.to(running).exp()[..., None]
        decayed_NHKV = (factor if factor.dim() == 4 else factor[..., None]) * state.to(running)
        error_NHV = value.to(running) - (key_NHK[..., None, :] @ decayed_NHKV).squeeze(-2)
        written_NHV = beta.to(running)[..., None] * error_NHV
        state = torch.addcmul(decayed_NHKV, key_NHK[..., None], written_NHV[..., None, :])
        y_NHV = (query_NHK[..., None, :] @ state).squeeze(-2)
    return y_NHV.to(value.dtype), state


class FiniteDecay(torch.autograd.Function):
    """apply(log_decay): those whose exponential is 0, as a number near the largest of them: with −∞ or −1e38, the sums
    of a chunk would lose the other decays. Gradients pass, which stores nothing: those of a decay of 0 are 0."""

    @staticmethod
    def forward(ctx, log_decay: Tensor) -> Tensor:
        limits = torch.finfo(log_decay.dtype)
        smallest = limits.tiny * limits.eps
        return log_decay.clamp(min=math.log(smallest) - 1)

    @staticmethod
    def backward(ctx, d_log_decay: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return d_log_decay
