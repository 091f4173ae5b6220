"""Attention to all earlier tokens in training tile by tile: the past is the keys and values of the earlier tiles.

Each tile adds its keys and values once, and later tiles read the same memory. The backward goes from the last tile to
the first, and each tile adds to the gradients of the keys and values before it, in place. So memory grows by these, by
their gradients, and by nothing else. The attention to a few keys at a time is exact: parts are joined by their
log-sum-exps, and the backward of a part needs only that of the whole.

A tile of the state has keys and values of a document, [B, G, t, E] side by side. A sequence rank stores those of its
heads, of all tokens.

Shapes: B rows, H heads of queries, G heads of keys and values, T tokens of a tile, t ≤ T of its last document, S keys,
D channels a head, E = 2·D.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tost_lm.mixers.softmax.attention import attend, flash, flash_offsets, obstacle_to_flash
from tost_lm.mixers.softmax.balance import attend_balanced
from tost_lm.mixers.softmax.cache import halves
from tost_lm.mixers.state import SharedState, TileTensor
from tost_lm.ops.backends import Backend, choose
from tost_lm.ops.positions import SequenceInfo
from tost_lm.ops.precision import statistics_dtype
from tost_lm.torch_internals import (
    cpu_flash_attention,
    cpu_flash_attention_backward,
    flash_attention_backward,
)


def attend_tile(
    q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, state: SharedState | None, info: SequenceInfo
) -> tuple[Tensor, SharedState | None]:
    """Attention of a tile's tokens to all earlier ones of their document, and the state for the next tile.

    Returns:
        y [B, H, T, D], and the state if `info` asks for it.
    """
    kv_BGTE, attend = torch.cat([k_BGTD, v_BGTD], -1), partial(_attend_up_to, state)
    if info.shard is None:
        y_BHTD = attend(q_BHTD, kv_BGTE, info)
    else:
        y_BHTD, kv_BGTE, info = attend_balanced(attend, q_BHTD, kv_BGTE, info)
    return y_BHTD, _next_state(kv_BGTE, state, info) if info.output_state else None


def _attend_up_to(state: SharedState | None, q_BHTD: Tensor, kv_BGSE: Tensor, info: SequenceInfo) -> Tensor:
    """Attention of the last T tokens to those of their documents in the tile and in earlier tiles."""
    local, T = info.local, q_BHTD.shape[2]
    before = kv_BGSE.shape[2] - T  # tokens of the tile
    ys, continued = [], 0
    if state is not None and local.documents.start == 0:
        continued = local.lengths[0] if local.packed else T
        ys.append(_WithEarlierTiles.apply(q_BHTD[:, :, :continued], kv_BGSE[:, :, : before + continued], state.tiles))
    if continued < T:
        skipped = 1 if continued else 0
        kept = 0 if skipped else min(before, local.before[0])
        q, kv = q_BHTD[:, :, continued:], halves(kv_BGSE[:, :, before + continued - kept :])
        lengths = local.lengths[skipped:]
        documents = (lengths, (kept + lengths[0], *lengths[1:])) if local.packed else None
        ys.append(attend(q, kv, 0, documents))
    return torch.cat(ys, 2) if len(ys) > 1 else ys[0]


def _next_state(kv_BGTE: Tensor, state: SharedState | None, info: SequenceInfo) -> SharedState:
    """The state of the last document of each row."""
    last = info.local.whole_lengths[-1]
    others = kv_BGTE.shape[2] - last
    kv_BGtE = kv_BGTE[:, :, others:].clone() if others else kv_BGTE  # a copy frees the memory of others
    return SharedState((*(state.tiles if state is not None and not others else ()), TileTensor(kv_BGtE)))


class _WithEarlierTiles(torch.autograd.Function):
    """apply(q, kv, tiles): attention of the last tokens to `kv` of their own tile, causal, and to earlier tiles."""

    @staticmethod
    def forward(ctx, q: Tensor, kv: Tensor, tiles: Sequence[TileTensor]) -> Tensor:
        ctx.tiles = tiles
        y = log_sum = None
        for part, causal in [*_parts_here(q, kv), *((tile.x, False) for tile in tiles)]:
            y_part, log_sum_part = _attend(q, *halves(part.to(q.device)), causal)
            y, log_sum = _joined(y, log_sum, y_part.to(statistics_dtype(q)), log_sum_part)
        assert y is not None
        y = y.to(q.dtype)
        ctx.save_for_backward(q, kv, y, log_sum)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, kv, y, log_sum = ctx.saved_tensors
        dq, dy = torch.zeros_like(q, dtype=statistics_dtype(q)), dy.contiguous()

        def of_part(part: Tensor, causal: bool) -> Tensor:
            nonlocal dq
            d_part_q, *d_kv = _attend_backward(dy, q, *halves(part), y, log_sum, causal)
            dq += d_part_q
            return torch.cat(d_kv, -1)

        d_kv = torch.cat([of_part(part, causal) for part, causal in _parts_here(q, kv)], 2)
        for tile in ctx.tiles:
            d_tile = of_part(tile.x.to(q.device), False)
            if tile.gradient is not None:
                tile.gradient += d_tile.to(tile.gradient)
        return dq.to(q.dtype), d_kv, None


def _parts_here(q: Tensor, kv: Tensor) -> Iterator[tuple[Tensor, bool]]:
    """Keys and values that are attended to, and whether causally: else by every query."""
    if earlier := kv.shape[2] - q.shape[2]:
        yield kv[:, :, :earlier], False
    yield kv[:, :, earlier:], True


def _joined(y: Tensor | None, log_sum: Tensor | None, y_part: Tensor, log_sum_part: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to the keys of both."""
    if y is None or log_sum is None:
        return y_part, log_sum_part
    both = torch.logaddexp(log_sum, log_sum_part)
    share, share_part = ((x - both).exp()[..., None] for x in (log_sum, log_sum_part))
    return y.mul_(share).add_(y_part.mul_(share_part)), both


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """y [B, H, T, D], and the log-sum-exp of the scores [B, H, T]; if causal, T = S."""
    forward, _, groups = choose(PARTS, q)
    return forward(q, *(x if groups else _shared(x, q) for x in (k, v)), causal)


def _attend_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, log_sum: Tensor, causal: bool
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v, where y and the log-sum-exp are those of all keys."""
    _, backward, groups = choose(PARTS, q)
    dq, *d_kv = backward(dy, q, *(x if groups else _shared(x, q) for x in (k, v)), y, log_sum, causal)
    return dq, *(d if len(d[0]) == k.shape[1] else d.unflatten(1, (k.shape[1], -1)).sum(2) for d in d_kv)


def _flash_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, log_sum: Tensor, causal: bool
) -> Iterator[Tensor]:
    dy_MHD, q_MHD, k_SGD, v_SGD, y_MHD = (x.transpose(1, 2).flatten(0, 1) for x in (dy, q, k, v, y))
    log_sum_HM = log_sum.transpose(0, 1).flatten(1).contiguous()
    found = flash_attention_backward(dy_MHD, q_MHD, k_SGD, v_SGD, y_MHD, log_sum_HM, flash_offsets(q, k), causal)
    return (d.unflatten(0, (len(q), -1)).transpose(1, 2) for d in found)


def _by_scores(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, causal)
    log_sum = scores.logsumexp(-1)
    return (scores - log_sum[..., None]).exp().to(v.dtype) @ v, log_sum


def _by_scores_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, log_sum: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    pi = (_scores(q, k, causal) - log_sum[..., None]).exp()
    d_scores = pi * (dy @ v.mT - (dy * y).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    return d_scores @ k, d_scores.mT @ q, pi.mT @ dy


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1) if causal else None
    return scores if hidden is None else scores.masked_fill(hidden, -torch.inf)


def _shared(x_BGSD: Tensor, q: Tensor) -> Tensor:
    """A head for each head of the queries."""
    return x_BGSD.repeat_interleave(q.shape[1] // x_BGSD.shape[1], 1) if x_BGSD.shape[1] != q.shape[1] else x_BGSD


PARTS = [
    Backend("flash", obstacle_to_flash, (flash, _flash_backward, True)),
    Backend(
        "cpu", lambda q: None if q.is_cpu else "no CPU", (cpu_flash_attention, cpu_flash_attention_backward, False)
    ),
    Backend("scores", None, (_by_scores, _by_scores_backward, False)),
]
"""Attention to some of the keys: functions of `_attend` and `_attend_backward`, and whether heads may share keys."""
