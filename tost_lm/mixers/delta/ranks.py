"""Sequence ranks of the gated delta rule.

The tokens of a document on a rank are an affine map of its state, S → M S + C. M [K, K] depends on the tokens, so a
scan column by column (`ops/exchange.py`) does not fit: the owner of some columns would need M of all ranks. Up to
`ALL_GATHER_RANKS` ranks gather the maps of all ranks instead, and each scans them. More ranks pass states on, from each
to the next, and in the backward their gradients from each to the one before. Neither depends on the length. Maps and
states are float32, or float64 for float64 values, also where the tokens are computed by kernels of 16 bits.

Only a document that crosses the border to the next rank needs a map: the last one of a rank, or all rows if each row is
a document. X below is their number, R that of ranks.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tost_lm.mixers.delta.chunked import delta_rule_chunks
from tost_lm.ops.layout import LocalDocuments, SequenceShard, int64_tensor
from tost_lm.ops.precision import statistics_dtype


def states_before(
    shard: SequenceShard, local: LocalDocuments, inputs: Sequence[Tensor], initial_NHKV: Tensor
) -> Tensor:
    """The states before this rank's tokens of its n documents, [n, H, K, V], differentiable.

    Args:
        inputs: key [M, h, K], value [M, H, V], log_decay and beta [M, H] of the M tokens of this rank.
        initial_NHKV: the states before the sequences, equal on all ranks; so is their gradient.
    """
    here_nHKV = _Shared.apply(initial_NHKV, shard)[local.documents]  # pyright: ignore[reportOptionalSubscript]
    count, first = (1, local.offsets[-2]) if local.packed else (len(local.lengths), 0)
    map_XHKE = _maps([x[first:] for x in inputs], local.lengths[-count:])
    starts_R = _starts(local, shard)
    own_XHKV = here_nHKV[-count:]
    before_XHKV = _Scan.apply(map_XHKE, own_XHKV, shard, starts_R, local.before[0] > 0)
    if not local.packed:
        return before_XHKV  # pyright: ignore[reportReturnType]
    # Always a result of the scan, so that all ranks take part in its backward.
    first_1HKV = before_XHKV if local.before[0] else here_nHKV[:1] + 0 * before_XHKV  # pyright: ignore[reportOperatorIssue]
    return torch.cat([first_1HKV, here_nHKV[1:]])  # pyright: ignore[reportArgumentType]


def final_states(shard: SequenceShard, local: LocalDocuments, final_nHKV: Tensor) -> Tensor:
    """The states after all N documents, equal on all ranks, from those after this rank's tokens of n documents."""
    ends = int64_tensor(local.after, final_nHKV.device) == 0
    ended_nHKV = final_nHKV.where(ends[:, None, None, None], 0)
    padding = [local.documents.start, len(local.whole_lengths) - local.documents.stop]
    rows = [ended_nHKV.new_zeros(size, *ended_nHKV.shape[1:]) for size in padding]
    return _Collected.apply(torch.cat([rows[0], ended_nHKV, rows[1]]), shard)  # pyright: ignore[reportReturnType]


def _maps(inputs: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """C and M side by side, [X, H, K, V + K]: the states that the tokens lead to from 0, and those from each unit."""
    key_MhK, value_MHV, log_decay_MH, beta_MH = inputs
    (H, V), K = value_MHV.shape[1:], key_MhK.shape[-1]
    unit_KE = torch.eye(K, K + V, dtype=statistics_dtype(value_MHV), device=value_MHV.device).roll(V, 1)
    value_MHE = torch.cat([value_MHV, value_MHV.new_zeros(*value_MHV.shape[:2], K)], -1)
    initial_XHKE = unit_KE.expand(len(lengths), H, K, V + K)
    return delta_rule_chunks(key_MhK, key_MhK, value_MHE, log_decay_MH, beta_MH, initial_XHKE, lengths)[1]


def _starts(local: LocalDocuments, shard: SequenceShard) -> tuple[bool, ...]:
    """Whether the documents that each rank has a map of begin on it."""
    ends = [0, *accumulate(shard.split.lengths)]
    if not local.packed:
        return tuple(start == 0 for start in ends[:-1])
    offsets = [0, *accumulate(local.whole_lengths)]
    return tuple(any(start <= x < end for x in offsets[:-1]) for start, end in pairwise(ends))


class _Scan(torch.autograd.Function):
    """The states before each rank's first tokens."""

    @staticmethod
    def forward(
        ctx, map_XHKE: Tensor, own_XHKV: Tensor, shard: SequenceShard, starts_R: tuple[bool, ...], continues: bool
    ) -> Tensor:
        V, rank = own_XHKV.shape[-1], shard.split.rank
        # The states before the documents that begin on a rank are those of this rank only.
        own, starts = own_XHKV.to(map_XHKE.dtype), starts_R[rank]
        if shard.gathers:
            added_R, map_R, own_R = _gathered(torch.cat([map_XHKE, own], -1), shard).split([V, own.shape[-2], V], -1)
            before = torch.zeros_like(own)
            for r in range(rank):
                before = added_R[r] + map_R[r] @ (own_R[r] if starts_R[r] else before)
            maps = map_R.contiguous()
        else:
            added, matrix = map_XHKE.split([V, own.shape[-2]], -1)
            before = shard.pass_on(own, lambda before, c: added[..., c] + matrix @ (own[..., c] if starts else before))
            maps = matrix[None].contiguous()
        ctx.shard, ctx.starts_R, ctx.continues, ctx.dtype = shard, starts_R, continues, own_XHKV.dtype
        ctx.save_for_backward(maps, own if starts else before)
        return before.to(own_XHKV.dtype) if continues else own_XHKV.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, d_before: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (maps, previous), shard, starts_R, rank = ctx.saved_tensors, ctx.shard, ctx.starts_R, ctx.shard.split.rank
        # What arrives before a rank's first tokens its last document passes on, unless it begins there.
        d_here = d_before.to(maps.dtype) if ctx.continues else torch.zeros_like(previous)
        if shard.gathers:
            matrix, d_R = maps[rank], _gathered(d_here, shard)
            d_after = torch.zeros_like(d_here)
            for r in reversed(range(rank + 1, len(starts_R))):
                d_after = d_R[r] if starts_R[r] else d_R[r] + maps[r].mT @ d_after
        else:
            matrix, starts = maps[0], starts_R[rank]
            d_after = shard.pass_on(
                d_here, lambda d, c: d_here[..., c] if starts else d_here[..., c] + matrix.mT @ d, reverse=True
            )
        d_own = torch.zeros_like(d_before) if ctx.continues else d_before
        if starts_R[rank]:
            d_own = d_own + (matrix.mT @ d_after).to(ctx.dtype)
        return torch.cat([d_after, d_after @ previous.mT], -1), d_own, None, None, None


class _Shared(torch.autograd.Function):
    """A tensor that all ranks have; each of them adds to its gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, shard: SequenceShard) -> Tensor:
        ctx.shard = shard
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, dx: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _summed(dx, ctx.shard), None


class _Collected(torch.autograd.Function):
    """The sum over ranks, which all of them have, like its gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, shard: SequenceShard) -> Tensor:
        return _summed(x, shard)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return dx, None


def _gathered(x: Tensor, shard: SequenceShard) -> Tensor:
    """x of all ranks, [R, …]."""
    rows = shard.exchange_rows(x.flatten(), lambda row_RC, _: row_RC.flatten().expand(len(row_RC), -1))
    return rows.unflatten(0, (-1, *x.shape))


def _summed(x: Tensor, shard: SequenceShard) -> Tensor:
    total = shard.exchange_rows(x.reshape(1, -1), lambda row_R1C, _: row_R1C.sum(0).expand_as(row_R1C))
    return total.view_as(x)
