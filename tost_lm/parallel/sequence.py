"""Sequence parallelism, which Megatron and torchtitan call context parallelism.

Softmax attention gathers keys and values, with a window those of each rank's last tokens. A TSSA layer exchanges one
row of statistics twice forward and twice backward, at any length: Σw², then Σ Π·w² with Σ Π; backward, their gradients
in reverse order. Each rank needs the sum over earlier ranks (backward: over later ranks). Up to `ALL_GATHER_RANKS`
ranks gather all rows. Above that, each rank sums a slice of the columns for all ranks, so the bytes it receives do not
grow with the ranks. The order is fixed, so all ranks have the same state. A delta layer gathers maps of states
(`tost_lm.ops.affine`); above that number of ranks, within groups of about √R ranks and then between groups. Shapes as
in `tost_lm.mixers.tssa.phases`; R ranks, C columns.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from tost_lm.ops.layout import SequenceSplit
from tost_lm.ops.precision import statistics_dtype
from tost_lm.parallel.mesh import Axis, all_gather, all_to_all, not_keeping_received, reduce_scatter
from tost_lm.sizes import ALL_GATHER_RANKS, rank_groups


class RankShard:
    """This rank's shard of every sequence (a `tost_lm.ops.layout.SequenceShard`)."""

    def __init__(self, axis: Axis, split: SequenceSplit):
        self.axis, self.split = axis, split

    @property
    def gathers(self) -> bool:
        """Whether a rank gathers the rows of all ranks, which are few enough."""
        return self.axis.size <= ALL_GATHER_RANKS

    @property
    def groups(self) -> tuple[range, ...]:
        """Implements `SequenceShard.groups`."""
        return (range(self.axis.size),) if self.gathers else rank_groups(self.axis.size)

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

    def gather_group(self, x: Tensor) -> Tensor:
        """Implements `SequenceShard.gather_group`."""
        return all_gather(x, self.axis)() if self.gathers else self._gather_from(_ranks_of_group, x)

    def gather_groups(self, x: Tensor) -> Tensor:
        """Implements `SequenceShard.gather_groups`."""
        return self._gather_from(_ranks_of_place, x)

    def _gather_from(self, sources: Callable[[int, int], Sequence[int]], x: Tensor) -> Tensor:
        """x of the ranks `sources(R, rank)`, of which this rank is one, by an all-to-all: [sources, …]."""
        R, rank = self.axis.size, self.axis.rank
        wanted = sources(R, rank)
        sent, received = (
            [x.numel() * (r != rank and r in of) for r in range(R)] for of in (_takers(sources, R, rank), wanted)
        )
        found = all_to_all(x.flatten().repeat(sum(map(bool, sent))), sent, received, self.axis).view(-1, *x.shape)
        own = wanted.index(rank)
        return torch.cat([found[:own], x[None], found[own:]])

    def gather(self, x_BHTD: Tensor, lengths: Sequence[int] | None = None, *, keep: bool = True) -> Tensor:
        """Implements `SequenceShard.gather`."""
        with nullcontext() if keep else not_keeping_received():
            return _Gather.apply(x_BHTD, self.axis, lengths or self.split.lengths)  # pyright: ignore[reportReturnType]


@cache
def _ranks_of_group(ranks: int, rank: int) -> range:
    return next(group for group in rank_groups(ranks) if rank in group)


@cache
def _ranks_of_place(ranks: int, rank: int) -> tuple[int, ...]:
    """A rank of each group: of its own group this one, and each rank of a group serves about as many others."""
    place = rank - _ranks_of_group(ranks, rank).start
    return tuple(group[place % len(group)] for group in rank_groups(ranks))


@cache
def _takers(sources: Callable[[int, int], Sequence[int]], ranks: int, rank: int) -> frozenset[int]:
    """The ranks of whose sources this rank is one."""
    return frozenset(other for other in range(ranks) if rank in sources(ranks, other))


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
