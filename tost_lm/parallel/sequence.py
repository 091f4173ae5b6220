"""Sequence parallelism, which Megatron and torchtitan call context parallelism.

Softmax attention gathers keys and values, with a window those of each rank's last tokens. A TSSA layer gathers one row
of statistics twice forward and twice backward, at any length: Σw², then Σ Π·w² with Σ Π; backward, their gradients in
reverse order. Each rank sums the rows of earlier ranks (backward: of later ranks) in a fixed order, so all ranks
compute the same state. Shapes as in `tost_lm.ops.phases`; R ranks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from tost_lm.ops.naive import statistics_dtype
from tost_lm.ops.sequence_shard import LocalDocuments, SequenceSplit
from tost_lm.parallel.collectives import all_gather, reduce_scatter
from tost_lm.parallel.mesh import Axis


class RankShard:
    """This rank's shard of every sequence (a `tost_lm.ops.sequence_shard.SequenceShard`)."""

    def __init__(self, axis: Axis, split: SequenceSplit):
        self.axis, self.split = axis, split

    def exclusive_scan(
        self,
        local: LocalDocuments,
        outside_N: Sequence[Tensor],
        here_n: Sequence[Tensor],
        *,
        reverse: bool,
        per_document: bool,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """As `SequenceShard.exclusive_scan`: one all-gather of a row per document, or of one row."""
        if per_document:
            sent = [_rows_of_all(x, local, len(outside)) for x, outside in zip(here_n, outside_N, strict=True)]
        else:
            sent = [x[:1] if reverse else x[-1:] for x in here_n]
        widths = [x[0].numel() for x in sent]
        gathered_R = all_gather(torch.cat([x.flatten(1) for x in sent], 1), self.axis)()
        rows_of_ranks = [row_R.view(-1, *x.shape) for row_R, x in zip(gathered_R.split(widths, -1), sent, strict=True)]
        others = local.later_ranks if reverse else local.earlier_ranks
        carries, totals = [], []
        for outside, here, row_R in zip(outside_N, here_n, rows_of_ranks, strict=True):
            carry = outside[local.documents].to(torch.promote_types(outside.dtype, here.dtype), copy=True)
            from_others = row_R[others.start : others.stop].sum(0)
            if per_document:
                carry += from_others[local.documents]
            else:
                carry[-1 if reverse else 0] += from_others[0]
            carries.append(carry)
            totals.append(outside + row_R.sum(0) if per_document else outside)
        return carries, totals

    def gather(self, x_BHTD: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
        """As `SequenceShard.gather`."""
        return _Gather.apply(x_BHTD, self.axis, lengths or self.split.lengths)  # pyright: ignore[reportReturnType]

    def all_gather(self, x: Tensor) -> Tensor:
        """As `SequenceShard.all_gather`."""
        return all_gather(x, self.axis)()


def _rows_of_all(x_n: Tensor, local: LocalDocuments, documents: int) -> Tensor:
    """A row for each document of the whole sequence, 0 for documents without tokens on this rank."""
    if len(x_n) == documents:
        return x_n
    x_N = x_n.new_zeros(documents, *x_n.shape[1:])
    x_N[local.documents] = x_n
    return x_N


class _Gather(torch.autograd.Function):
    """Pads shards to the longest for the collective. Sums gradients in float32 or higher."""

    @staticmethod
    def forward(ctx, x_BHTD: Tensor, axis: Axis, lengths: Sequence[int]) -> Tensor:
        ctx.axis, ctx.lengths = axis, lengths
        longest = max(lengths)
        shards = all_gather(pad(x_BHTD, (0, 0, 0, longest - x_BHTD.shape[2])), axis)().unbind(0)
        return torch.cat([shard[:, :, :length] for shard, length in zip(shards, lengths, strict=True)], 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_BHTD: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        longest = max(ctx.lengths)
        shards = [pad(shard, (0, 0, 0, longest - shard.shape[2])) for shard in d_BHTD.split(ctx.lengths, 2)]
        d_shard = reduce_scatter(torch.stack(shards).to(statistics_dtype(d_BHTD)), ctx.axis)
        return d_shard[:, :, : ctx.lengths[ctx.axis.rank]].to(d_BHTD.dtype), None, None
