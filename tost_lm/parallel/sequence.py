"""Sequence parallelism, which Megatron and torchtitan call context parallelism.

Softmax attention gathers keys and values, with a window those of each rank's last tokens. A TSSA layer exchanges one
row of statistics twice forward and twice backward, at any length: Σw², then Σ Π·w² with Σ Π; backward, their gradients
in reverse order. Each rank needs the sum over earlier ranks (backward: over later ranks). Up to `ALL_GATHER_RANKS`
ranks gather all rows. Above that, each rank sums a slice of the columns for all ranks, so the bytes it receives do not
grow with the ranks. The order is fixed, so all ranks have the same state. A delta layer gathers maps of states
(`tost_lm.ops.affine`), or passes states on from rank to rank. Shapes as in `tost_lm.mixers.tssa.phases`; R
ranks, C columns.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from tost_lm.ops.layout import SequenceSplit
from tost_lm.ops.precision import statistics_dtype
from tost_lm.parallel.mesh import Axis, all_gather, all_to_all, not_keeping_received, reduce_scatter
from tost_lm.sizes import ALL_GATHER_RANKS, PASSED_SLICES


class RankShard:
    """This rank's shard of every sequence (a `tost_lm.ops.layout.SequenceShard`)."""

    def __init__(self, axis: Axis, split: SequenceSplit):
        self.axis, self.split = axis, split

    @property
    def gathers(self) -> bool:
        """Implements `SequenceShard.gathers`."""
        return self.axis.size <= ALL_GATHER_RANKS

    def exchange_rows(self, row: Tensor, function: Callable[[Tensor, slice], Tensor]) -> Tensor:
        """`SequenceShard.exchange_rows`: one all-gather, or above `ALL_GATHER_RANKS` ranks two all-to-alls."""
        R, C = self.axis.size, row.shape[-1]
        if self.gathers:
            return function(all_gather(row, self.axis)(), slice(C))[self.axis.rank].clone()  # frees the other ranks'
        columns = SequenceSplit.even(C, R, self.axis.rank)
        own = [columns.end - columns.start] * R
        received = all_to_all(row.flatten(0, -2).T, columns.lengths, own, self.axis)
        row_R = received.view(R, own[0], row.shape[:-1].numel()).mT.unflatten(1, row.shape[:-1])
        result_R = function(row_R, slice(columns.start, columns.end))
        returned = all_to_all(result_R.flatten(1, -2).mT.flatten(0, 1), own, columns.lengths, self.axis)
        return returned.T.contiguous().unflatten(0, result_R.shape[1:-1])

    def pass_on(self, like: Tensor, function: Callable[[Tensor, slice], Tensor], *, reverse: bool = False) -> Tensor:
        """`SequenceShard.pass_on`: an all-to-all a hop, in which ranks send a slice to their neighbour only."""
        R, rank, C = self.axis.size, self.axis.rank, like.shape[-1]
        place, after, before = (R - 1 - rank, rank - 1, rank + 1) if reverse else (rank, rank + 1, rank - 1)
        count = min(C, PASSED_SLICES)
        columns = [SequenceSplit.even(C, count, i) for i in range(count)]
        slices = [slice(one.start, one.end) for one in columns]
        received = [torch.zeros_like(like[..., one]) for one in slices]
        nothing = like.new_empty(0)
        for hop in range(R + count - 2):
            number, sent, sizes, expected = hop - place, nothing, [0] * R, [0] * R
            if place < R - 1 and 0 <= number < count:
                sent = function(received[number], slices[number]).flatten()
                sizes[after] = len(sent)
            if arrives := place > 0 and 0 <= number + 1 < count:
                expected[before] = received[number + 1].numel()
            found = all_to_all(sent, sizes, expected, self.axis)
            if arrives:
                received[number + 1] = found.view_as(received[number + 1])
        return torch.cat(received, -1)

    def gather(self, x_BHTD: Tensor, lengths: Sequence[int] | None = None, *, keep: bool = True) -> Tensor:
        """Implements `SequenceShard.gather`."""
        with nullcontext() if keep else not_keeping_received():
            return _Gather.apply(x_BHTD, self.axis, lengths or self.split.lengths)  # pyright: ignore[reportReturnType]


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
