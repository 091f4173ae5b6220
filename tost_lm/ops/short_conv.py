"""A causal convolution over a few tokens, per channel: y_t = Σ_j weight_j · x_{t − K + 1 + j}, or SiLU of it.

It starts afresh at each document. The last K − 1 tokens are its state; before a document's first token they are zeros.
On CUDA devices it is the kernel of flash-linear-attention (package fla-core), where that is installed. The kernel is
chosen by its measured time, so it is not used where torch asks for deterministic algorithms.

Shapes: B sequences, T tokens, C channels, K taps, P = K − 1, M tokens with those before them, N documents (N = B unless
packed), n of them with tokens on this rank.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad, silu

from tost_lm.ops.affine import affine_scan
from tost_lm.ops.backends import LOW_PRECISION, Backend, choose, obstacle_to_kernels
from tost_lm.ops.layout import LocalDocuments, SequenceShard, fla_documents
from tost_lm.ops.positions import SequenceInfo
from tost_lm.ops.precision import statistics_dtype

CPU_ELEMENTS = 1 << 18
"""Channels of tokens that a CPU convolves at once: they stay in its cache."""


def short_conv(
    x_BTC: Tensor,
    weight_CK: Tensor,
    *,
    local: LocalDocuments,
    initial_NPC: Tensor | None = None,
    output_final_state: bool = False,
    shard: SequenceShard | None = None,
    activated: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The convolution of each document, and the last K − 1 tokens of each, differentiable.

    Args:
        x_BTC: tokens, any floating dtype.
        weight_CK: K ≥ 2 taps a channel, the last one for the token itself.
        local: the documents of these tokens.
        initial_NPC: the K − 1 tokens before each document, older ones first; None: zeros.
        output_final_state: return the last K − 1 tokens of each document; else None.
        shard: the tokens are a sequence shard. States and their gradients are equal on all ranks.
        activated: SiLU of the outputs. The backward computes the convolution again instead of storing it.

    Returns:
        y [B, T, C] in the dtype of x, and the final state [N, K − 1, C] or None.
    """
    convolve, P = partial(choose(BACKENDS, x_BTC), activated=activated), weight_CK.shape[1] - 1
    if shard is None:
        return convolve(x_BTC, weight_CK, initial_NPC, local, output_final_state)

    def scan(before_nPC: Tensor) -> tuple[Tensor, Tensor]:
        return convolve(x_BTC, weight_CK, before_nPC, local, True)

    def maps(tokens: slice, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The earlier tokens move by as many places as there are tokens."""
        places = torch.eye(2 * P, P, dtype=x_BTC.dtype, device=x_BTC.device)
        moved_XPP = torch.stack([places[min(length, P) :][:P] for length in lengths])
        documents = x_BTC.flatten(0, 1)[tokens].split(list(lengths))
        return moved_XPP, torch.stack([_last(pad(x_tC, (0, 0, P, 0)), P) for x_tC in documents])

    initial_NPC = _or_zeros(initial_NPC, x_BTC, P, len(local.whole_lengths))
    return affine_scan(scan, maps, initial_NPC, local=local, shard=shard, output_final_state=output_final_state)


def _or_zeros(state_NPC: Tensor | None, x_BTC: Tensor, P: int, documents: int) -> Tensor:
    """The tokens before documents, in the dtype of x."""
    return x_BTC.new_zeros(documents, P, x_BTC.shape[-1]) if state_NPC is None else state_NPC.to(x_BTC.dtype)


def _in_pytorch(
    x_BTC: Tensor, weight_CK: Tensor, before_nPC: Tensor | None, local: LocalDocuments, output_final_state: bool,
    activated: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    P, final_nPC = weight_CK.shape[1] - 1, None
    before_nPC = _or_zeros(before_nPC, x_BTC, P, len(local.lengths))
    documents = x_BTC.flatten(0, 1).split(local.lengths)
    if output_final_state:
        final_nPC = torch.stack([_last(torch.cat(rows), P) for rows in zip(before_nPC, documents, strict=True)])
    if not local.packed:
        return _tap_by_tap(torch.cat([before_nPC, x_BTC], 1), weight_CK, activated), final_nPC
    pieces = [piece for rows in zip(before_nPC, documents, strict=True) for piece in rows]
    y_MC = _tap_by_tap(torch.cat(pieces)[None], weight_CK, activated)[0]
    with_gaps = y_MC.split([size for length in local.lengths for size in (length, P)][:-1])
    return torch.cat(with_gaps[::2])[None], final_nPC


def _obstacle_to_fla(x_BTC: Tensor) -> str | None:
    if torch.are_deterministic_algorithms_enabled():
        return "algorithms must be deterministic, but its kernel is chosen by its measured time"
    return obstacle_to_kernels(x_BTC, LOW_PRECISION, "fla-core")


def _by_fla(
    x_BTC: Tensor, weight_CK: Tensor, before_nPC: Tensor | None, local: LocalDocuments, output_final_state: bool,
    activated: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """One launch for all documents; the state of the kernel has K tokens, the oldest of which no output reads."""
    from fla.modules import causal_conv1d as fla  # an optional package, and slow to import

    kernel: Any = fla.causal_conv1d
    y_BTC, final_nCK = kernel(
        x_BTC.contiguous(),
        weight_CK,
        initial_state=None if before_nPC is None else pad(before_nPC.to(x_BTC.dtype).mT, (1, 0)).contiguous(),
        output_final_state=output_final_state,
        activation="silu" if activated else None,
        **(fla_documents(local.offsets, x_BTC.device) if local.packed else {}),
    )
    return y_BTC, None if final_nCK is None else final_nCK.mT[:, 1:]


BACKENDS = [Backend("fla-core", _obstacle_to_fla, _by_fla), Backend("PyTorch", None, _in_pytorch)]


class _TapByTap(torch.autograd.Function):
    """[B, M − P, C], without the first P tokens, which the convolution only reads. In the statistics dtype; on a CPU,
    torch's conv1d takes three times as long."""

    @staticmethod
    def forward(ctx, x_BMC: Tensor, weight_CK: Tensor, activated: bool):
        ctx.save_for_backward(x_BMC, weight_CK)
        ctx.activated = activated
        y_BTC = torch.empty_like(x_BMC[:, weight_CK.shape[1] - 1 :])
        for first, last, x, weight_KC in _rows(x_BMC, weight_CK):
            y = _convolved(x, weight_KC)
            y_BTC[:, first:last] = silu(y, inplace=True) if activated else y
        return y_BTC

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_BTC: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x_BMC, weight_CK = ctx.saved_tensors
        dx_BMC = torch.zeros_like(x_BMC, dtype=statistics_dtype(x_BMC))
        d_weight_KC = torch.zeros_like(weight_CK.mT, dtype=dx_BMC.dtype)
        for first, last, x, weight_KC in _rows(x_BMC, weight_CK):
            dy = dy_BTC[:, first:last].to(dx_BMC.dtype)
            if ctx.activated:
                dy = torch.ops.aten.silu_backward(dy, _convolved(x, weight_KC))
            for j, weight_C in enumerate(weight_KC):
                dx_BMC[:, first + j : last + j].addcmul_(dy, weight_C)
                d_weight_KC[j] += (dy * x[:, j : j + last - first]).sum((0, 1))
        return dx_BMC.to(x_BMC.dtype), d_weight_KC.mT.to(weight_CK.dtype), None


_tap_by_tap: Any = _TapByTap.apply


def _convolved(x_BMC: Tensor, weight_KC: Tensor) -> Tensor:
    T = x_BMC.shape[1] + 1 - len(weight_KC)
    y_BTC = x_BMC[:, :T] * weight_KC[0]
    for j, weight_C in enumerate(weight_KC[1:], 1):
        y_BTC.addcmul_(x_BMC[:, j : j + T], weight_C)
    return y_BTC


def _rows(x_BMC: Tensor, weight_CK: Tensor) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Some outputs at a time, `first` to `last`: x from `first` to `last` + P, and the weights; statistics dtype."""
    dtype, P = statistics_dtype(x_BMC), weight_CK.shape[1] - 1
    (B, M, C), weight_KC = x_BMC.shape, weight_CK.mT.to(dtype).contiguous()
    T = M - P
    rows = max(1, CPU_ELEMENTS // (B * C)) if x_BMC.is_cpu else T
    for first in range(0, T, rows):
        last = min(T, first + rows)
        yield first, last, x_BMC[:, first : last + P].to(dtype), weight_KC


def _last(x_MC: Tensor, rows: int) -> Tensor:
    return x_MC[len(x_MC) - rows :]


def conv_of(
    info: SequenceInfo,
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    taps_NPC: Tensor | None,
    activated: bool = False,
) -> tuple[Sequence[Tensor], Tensor | None]:
    """`short_conv` of several tensors of tokens in the documents of a call, and the rows of the final state that it
    requests. They share one state, of all channels. Each output is contiguous, so the next operator copies none."""
    channels, taps_NPC = [len(weight_CK) for weight_CK in weights], info.pad_rows(taps_NPC)
    if info.shard is not None:  # one exchange for all
        xs, weights = [torch.cat(list(xs), -1)], [torch.cat(list(weights))]
    before = [None] * len(xs) if taps_NPC is None else taps_NPC.split([len(weight_CK) for weight_CK in weights], -1)
    convolved = [
        short_conv(x_BTC, weight_CK, local=info.local, initial_NPC=before_NPC, activated=activated,
                   output_final_state=bool(info.output_state), shard=info.shard)
        for x_BTC, weight_CK, before_NPC in zip(xs, weights, before, strict=True)
    ]  # fmt: skip
    ys, finals = zip(*convolved, strict=True)
    ys = ys[0].split(channels, -1) if info.shard is not None else ys
    return ys, info.select_rows(torch.cat(finals, -1)) if info.output_state else None
