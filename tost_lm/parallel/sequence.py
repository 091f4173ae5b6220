"""Sequence parallelism: TSSA's sums and softmax attention's keys and values over the shards of a sequence.

A TSSA layer gathers one row of statistics twice forward and twice backward, whatever the length: Σw² and then Σ Π·w²
with Σ Π; in the backward the gradients of the latter and then of the former. Each rank adds up the rows that come
before it (after it, in the backward), always in the same order, so that all ranks find the same state. Shapes as in
`tost_lm.ops.phases`; R ranks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from tost_lm.ops.naive import statistics_dtype
from tost_lm.ops.split import Pieces, SequenceSplit
from tost_lm.parallel.collectives import all_gather, reduce_scatter
from tost_lm.parallel.mesh import Axis


class RankShard:
    """This rank's shard of every sequence (a `tost_lm.ops.phases.SequenceShard`)."""

    def __init__(self, axis: Axis, split: SequenceSplit):
        self.axis, self.split = axis, split

    def join(
        self, pieces: Pieces, outside_N: Sequence[Tensor], here_n: Sequence[Tensor], *, later: bool, rows: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """As `SequenceShard.join`; one all-gather of a row for each document, or of one row without `rows`."""
        if rows:
            sent = [_spread(x, pieces, len(outside)) for x, outside in zip(here_n, outside_N, strict=True)]
        else:
            sent = [x[:1] if later else x[-1:] for x in here_n]
        widths = [x[0].numel() for x in sent]
        gathered_R = all_gather(torch.cat([x.flatten(1) for x in sent], 1), self.axis)()
        parts = [part.view(-1, *x.shape) for part, x in zip(gathered_R.split(widths, -1), sent, strict=True)]
        others = pieces.later_ranks if later else pieces.earlier_ranks
        carries, totals = [], []
        for outside, here, part_R in zip(outside_N, here_n, parts, strict=True):
            carry = outside[pieces.documents].to(torch.promote_types(outside.dtype, here.dtype), copy=True)
            from_others = part_R[others.start : others.stop].sum(0)
            if rows:
                carry += from_others[pieces.documents]
            else:
                carry[-1 if later else 0] += from_others[0]
            carries.append(carry)
            totals.append(outside + part_R.sum(0) if rows else outside)
        return carries, totals

    def gather(self, x_BHTD: Tensor) -> Tensor:
        """All tokens of the sequence, [B, H, T, D] of every rank in their order, differentiable."""
        return _Gather.apply(x_BHTD, self.axis, self.split)  # pyright: ignore[reportReturnType]


def _spread(x_n: Tensor, pieces: Pieces, documents: int) -> Tensor:
    """A row for each document of the whole sequence; 0 for those without tokens here."""
    if len(x_n) == documents:
        return x_n
    x_N = x_n.new_zeros(documents, *x_n.shape[1:])
    x_N[pieces.documents] = x_n
    return x_N


class _Gather(torch.autograd.Function):
    """Shards are filled up to the longest on their way. Gradients are summed in float32 at least."""

    @staticmethod
    def forward(ctx, x_BHTD: Tensor, axis: Axis, split: SequenceSplit) -> Tensor:
        ctx.axis, ctx.split = axis, split
        longest = max(split.lengths)
        parts = all_gather(pad(x_BHTD, (0, 0, 0, longest - x_BHTD.shape[2])), axis)().unbind(0)
        return torch.cat([part[:, :, :length] for part, length in zip(parts, split.lengths, strict=True)], 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_BHTD: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        longest = max(ctx.split.lengths)
        parts = [pad(part, (0, 0, 0, longest - part.shape[2])) for part in d_BHTD.split(ctx.split.lengths, 2)]
        d_shard = reduce_scatter(torch.stack(parts).to(statistics_dtype(d_BHTD)), ctx.axis)
        return d_shard[:, :, : ctx.split.lengths[ctx.axis.rank]].to(d_BHTD.dtype), None, None
