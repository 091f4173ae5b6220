"""Sequence parallelism, which Megatron and torchtitan call context parallelism.

Softmax attention exchanges tokens for heads, or with a window gathers keys and values of each rank's last tokens. A
TSSA layer exchanges one row of statistics twice forward and twice backward, at any length: Σw², then Σ Π·w² with Σ Π;
backward, their gradients in reverse order. Each rank needs the sum over earlier ranks (backward: over later ranks). Up
to `ALL_GATHER_RANKS` ranks gather all rows. Above that, each rank sums a slice of the columns for all ranks, so the
bytes it receives do not grow with the ranks. The order is fixed, so all ranks have the same state. Other layers gather
maps of states (`tost_lm.ops.affine`); above that number of ranks, within groups of about √R ranks and then between
groups. Shapes as in `tost_lm.mixers.tssa.phases`; R ranks, C columns.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from tost_lm.ops.layout import Dealt, SequenceSplit
from tost_lm.ops.precision import statistics_dtype
from tost_lm.parallel.mesh import Axis, all_gather, all_to_all, reduce_scatter
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

    def exchange_rows(self, row: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """`SequenceShard.exchange_rows`: one all-gather, or above `ALL_GATHER_RANKS` ranks two all-to-alls."""
        R, C = self.axis.size, row.shape[-1]
        if self.gathers:
            return function(all_gather(row, self.axis)())[self.axis.rank].clone()  # frees the other ranks'
        columns = SequenceSplit.even(C, R, self.axis.rank).lengths
        own = [columns[self.axis.rank]] * R
        received = all_to_all(row.flatten(0, -2).T, columns, own, self.axis)
        row_R = received.view(R, own[0], row.shape[:-1].numel()).mT.unflatten(1, row.shape[:-1])
        result_R = function(row_R)
        returned = all_to_all(result_R.flatten(1, -2).mT.flatten(0, 1), own, columns, self.axis)
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

    def gather(self, x_BHTD: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
        """Implements `SequenceShard.gather`."""
        return _Gather.apply(x_BHTD, self.axis, lengths or self.split.lengths)  # pyright: ignore[reportReturnType]

    def deal(self, parts: Sequence[Dealt], *xs_BHTD: Tensor) -> tuple[Tensor, ...]:
        """Implements `SequenceShard.deal`: one all-to-all."""
        return _Deal.apply(self, parts, *xs_BHTD)  # pyright: ignore[reportReturnType]

    def collect(self, part: Dealt, y_BhtD: Tensor, heads: int) -> Tensor:
        """Implements `SequenceShard.collect`: one all-to-all."""
        return _Collect.apply(self, part, y_BhtD, heads)  # pyright: ignore[reportReturnType]


class _Deal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard: RankShard, parts: Sequence[Dealt], *xs: Tensor):
        ctx.shard, ctx.parts, ctx.heads = shard, parts, [x.shape[1] for x in xs]
        return tuple(_sent(shard, parts, xs))

    @staticmethod
    @once_differentiable
    def backward(ctx, *d_ys: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, *_returned(ctx.shard, ctx.parts, d_ys, ctx.heads)


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard: RankShard, part: Dealt, y: Tensor, heads: int):
        ctx.shard, ctx.part = shard, part
        return _returned(shard, [part], [y], [heads])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, d_x: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, *_sent(ctx.shard, [ctx.part], [d_x]), None


def _sent(shard: RankShard, parts: Sequence[Dealt], xs: Sequence[Tensor]) -> list[Tensor]:
    """From the ranks that hold tokens to those that compute with them."""
    (rank, size, _), lengths = shard.axis, shard.split.lengths
    shapes, sent, sizes = _shapes(shard, parts, xs), [], []
    for r in range(size):
        dealt = [(x[:, part.heads[r]], part.held(lengths, r, rank)) for x, part in zip(xs, parts, strict=True)]
        to_rank = [torch.cat([x[:, :, one] for one in held] or [x[:, :, :0]], 2).flatten() for x, held in dealt]
        sent += to_rank
        sizes.append(sum(map(len, to_rank)))
    received = all_to_all(torch.cat(sent), sizes, [sum(map(math.prod, of_rank)) for of_rank in shapes], shard.axis)
    flat = iter(received.split([math.prod(shape) for of_rank in shapes for shape in of_rank]))
    of_ranks = [[next(flat).view(shape) for shape in of_rank] for of_rank in shapes]
    return [torch.cat(from_ranks, 2) for from_ranks in zip(*of_ranks, strict=True)]


def _returned(shard: RankShard, parts: Sequence[Dealt], ys: Sequence[Tensor], heads: Sequence[int]) -> list[Tensor]:
    """The transposed function: sums of what the ranks computed, in float32 or higher."""
    (rank, size, _), lengths, B = shard.axis, shard.split.lengths, len(ys[0])
    shapes = _shapes(shard, parts, ys)
    split = zip(*(y.split([of_rank[i][2] for of_rank in shapes], 2) for i, y in enumerate(ys)), strict=True)
    sent = torch.cat([x.flatten() for to_rank in split for x in to_rank])
    sums = [
        y.new_zeros(B, H, lengths[rank], y.shape[3], dtype=statistics_dtype(y)) for y, H in zip(ys, heads, strict=True)
    ]
    back = [
        [(B, *part.shape(lengths, r, rank), y.shape[3]) for part, y in zip(parts, ys, strict=True)] for r in range(size)
    ]
    sizes, sizes_back = ([sum(map(math.prod, each)) for each in of_ranks] for of_ranks in (shapes, back))
    received = all_to_all(sent, sizes, sizes_back, shard.axis)
    for n, x in enumerate(received.split([math.prod(shape) for each in back for shape in each])):
        r, i = divmod(n, len(parts))
        held = parts[i].held(lengths, r, rank)
        of_slices = x.view(back[r][i]).split([one.stop - one.start for one in held], 2) if held else ()
        for one, of_slice in zip(held, of_slices, strict=True):
            sums[i][:, parts[i].heads[r], one] += of_slice
    return [x.to(y.dtype) for x, y in zip(sums, ys, strict=True)]


def _shapes(shard: RankShard, parts: Sequence[Dealt], like: Sequence[Tensor]) -> list[list[tuple[int, ...]]]:
    """By rank that holds tokens, of each part the shape of what this rank computes with."""
    (rank, size, _), lengths = shard.axis, shard.split.lengths
    return [
        [(len(x), *part.shape(lengths, rank, holder), x.shape[3]) for x, part in zip(like, parts, strict=True)]
        for holder in range(size)
    ]


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
