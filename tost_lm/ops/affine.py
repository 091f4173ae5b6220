"""States that sequence ranks pass on where tokens map them affinely: S → A S + C, A a diagonal or a matrix.

A may depend on the tokens, so ranks cannot sum column by column (`tost_lm.ops.exchange`): the owner of some columns
would need A of all ranks. Ranks gather A and C within groups of neighbours instead (`SequenceShard.groups`: one group
up to `ALL_GATHER_RANKS` ranks, about √R of more), compose those of their group, gather what groups composed, and scan
both. Neither depends on the length.

Only a document that crosses the border to the next rank needs A and C: the last one of a rank, or all rows if each row
is a document. X below is their number; N documents, n of them with tokens on this rank, R ranks. States have the shape
[N, …, K, V], A [X, …, K, K], or [X, …, K, 1] for a diagonal.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from tost_lm.ops.layout import LocalDocuments, SequenceShard, documents_begin, int64_tensor
from tost_lm.ops.precision import running_dtype


def affine_scan(
    scan: Callable[[Tensor], tuple[Tensor, Tensor]],
    maps: Callable[[slice, Sequence[int]], tuple[Tensor, Tensor]],
    initial_N: Tensor,
    *,
    local: LocalDocuments,
    shard: SequenceShard | None,
    output_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """The outputs of this rank's tokens and the final states, differentiable, on any number of sequence ranks.

    Every rank takes part in the exchanges of both passes, whether or not its outputs depend on the states.

    Args:
        scan: from the states before this rank's tokens of its n documents, in the dtype of `initial_N`, the outputs and
            the states after them. Each document is on its own.
        maps: A and C of documents: called with a slice of this rank's flat tokens and the lengths of the X documents
            that these are. C is the state that they lead to from 0. Both have one dtype. It is not called without
            ranks.
        initial_N: the states before the sequences. They, the final states and the gradients of both are equal on all
            ranks.
        shard: None: all tokens are here.

    Returns:
        The outputs, and the final states of all N documents, or None unless `output_final_state`.
    """
    if shard is None:
        output, final_N = scan(initial_N)
        return output, final_N if output_final_state else None
    count, first = (1, local.offsets[-2]) if local.packed else (len(local.lengths), 0)
    factor_X, added_X = maps(slice(first, None), local.lengths[-count:])
    before_n: Tensor = _StatesBefore.apply(factor_X, added_X, initial_N, shard, local)  # pyright: ignore[reportAssignmentType]
    output, final_n = scan(before_n)
    # So that the backward of `before_n` is called with that of the output, on each rank.
    output: Tensor = _PassedGradient.apply(lambda x: x.view_as(x), output, before_n)  # pyright: ignore[reportAssignmentType]
    return output, _final_states(shard, local, final_n) if output_final_state else None


def initial_states(state_N: Tensor | None, shape: list[int], like: Tensor) -> Tensor:
    """The states in the dtype of running sums, on the device of `like`; zeros for None.

    Raises:
        ValueError: they have another shape.
    """
    running = running_dtype(like.device)
    if state_N is None:
        return like.new_zeros(shape, dtype=running)
    if list(state_N.shape) != shape:
        raise ValueError(f"the state must be {shape}, got {list(state_N.shape)}")
    return state_N.to(running)


class _StatesBefore(torch.autograd.Function):
    """The states before this rank's tokens of its documents."""

    @staticmethod
    def forward(
        ctx, factor_X: Tensor, added_X: Tensor, initial_N: Tensor, shard: SequenceShard, local: LocalDocuments
    ) -> Tensor:
        X, V, rank = len(added_X), added_X.shape[-1], shard.split.rank
        # The states before the documents that begin on a rank are those of this rank only.
        here_n, starts_R = initial_N[local.documents], _starts(local, shard)
        own, starts = here_n[-X:].to(added_X.dtype), starts_R[rank]
        group, earlier, _ = _position(shard)
        after = added_X + _product(factor_X, own) if starts else added_X
        added_r, factor_r = shard.gather_group(torch.cat([after, factor_X], -1)).tensor_split([V], -1)
        before, factors = torch.zeros_like(own), [factor_r.contiguous()]
        if len(shard.groups) > 1:
            composed = _composed(added_r, factor_r, starts_R[group.start : group.stop])
            added_g, factor_g = shard.gather_groups(composed).tensor_split([V], -1)
            before = _scan(before, added_g[:earlier], factor_g, _any_starts(starts_R, shard))
            factors.append(factor_g.contiguous())
        before = _scan(before, added_r[: rank - group.start], factor_r, starts_R[group.start :])
        ctx.shard, ctx.local, ctx.starts_R = shard, local, starts_R
        ctx.save_for_backward(own if starts else before, *factors)
        return torch.cat([before.to(here_n.dtype), here_n[X:]]) if local.before[0] else here_n.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, d_before_n: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (previous, factor_r, *of_groups), shard, local = ctx.saved_tensors, ctx.shard, ctx.local
        starts_R, X, rank = ctx.starts_R, len(previous), shard.split.rank
        group, _, later = _position(shard)
        # What arrives before a rank's first tokens its last document passes on, unless it begins there.
        d_here = d_before_n[:X].to(factor_r.dtype) if local.before[0] else torch.zeros_like(previous)
        d_r, factors_r = shard.gather_group(d_here).flip(0), factor_r.flip(0)
        starts_r = starts_R[group.start : group.stop][::-1]
        d_after = torch.zeros_like(d_here)
        if of_groups:
            d_g = shard.gather_groups(_scan(d_after, d_r, factors_r, starts_r, transposed=True)).flip(0)
            starts_g = _any_starts(starts_R, shard)[::-1]
            d_after = _scan(d_after, d_g[:later], of_groups[0].flip(0), starts_g, transposed=True)
        d_after = _scan(d_after, d_r[: group.stop - 1 - rank], factors_r, starts_r, transposed=True)
        factor = factor_r[rank - group.start]
        is_diagonal = factor.shape[-1] == 1
        d_factor = (d_after * previous).sum(-1, keepdim=True) if is_diagonal else d_after @ previous.mT
        if not ctx.needs_input_grad[2]:
            return d_factor, d_after, None, None, None
        d_initial_N = d_before_n.new_zeros(len(local.whole_lengths), *d_before_n.shape[1:])
        d_here_n = d_initial_N[local.documents]
        d_here_n.copy_(d_before_n)
        if local.before[0]:
            d_here_n[:X] = 0
        if starts_R[rank]:
            d_here_n[-X:] += _product(factor, d_after, transposed=True).to(d_here_n.dtype)
        return d_factor, d_after, _summed(d_initial_N, shard), None, None


class _PassedGradient(torch.autograd.Function):
    """apply(function, x, *others): function(x), whose gradient x receives unchanged. Backwards of `others` run too."""

    @staticmethod
    def forward(ctx, function: Callable[[Tensor], Tensor], x: Tensor, *others: Tensor) -> Tensor:
        ctx.others = len(others)
        return function(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, dy, *[None] * ctx.others


def _final_states(shard: SequenceShard, local: LocalDocuments, final_n: Tensor) -> Tensor:
    """The states after all N documents, equal on all ranks, from those after this rank's tokens of n documents."""
    ends_n = int64_tensor(local.after, final_n.device) == 0
    ended_n = final_n.where(ends_n.view(-1, *[1] * (final_n.dim() - 1)), 0)
    padding = [local.documents.start, len(local.whole_lengths) - local.documents.stop]
    rows = [ended_n.new_zeros(size, *ended_n.shape[1:]) for size in padding]
    rows_N = torch.cat([rows[0], ended_n, rows[1]])
    return _PassedGradient.apply(partial(_summed, shard=shard), rows_N)  # pyright: ignore[reportReturnType]


def _starts(local: LocalDocuments, shard: SequenceShard) -> tuple[bool, ...]:
    """Whether the X documents of each rank begin on it."""
    lengths = local.whole_lengths
    return documents_begin(shard.split.lengths, lengths if local.packed else lengths[:1])


def _position(shard: SequenceShard) -> tuple[range, int, int]:
    """The group of this rank, and the numbers of groups before and after it."""
    groups = shard.groups
    earlier = sum(group.stop <= shard.split.rank for group in groups)
    return groups[earlier], earlier, len(groups) - 1 - earlier


def _any_starts(starts_R: Sequence[bool], shard: SequenceShard) -> tuple[bool, ...]:
    """Whether a document of X begins on a rank of each group."""
    return tuple(any(starts_R[group.start : group.stop]) for group in shard.groups)


def _scan(
    state: Tensor,
    added_r: Sequence[Tensor] | Tensor,
    factor_r: Tensor,
    starts_r: Sequence[bool],
    *,
    transposed: bool = False,
) -> Tensor:
    """The state after as many maps as `added_r` has; one that starts does not depend on the state."""
    for added, factor, starts in zip(added_r, factor_r, starts_r, strict=False):
        state = added if starts else added + _product(factor, state, transposed=transposed)
    return state


def _composed(added_r: Tensor, factor_r: Tensor, starts_r: Sequence[bool]) -> Tensor:
    """One map for consecutive ones, C and A side by side: C is the state that they lead to from 0."""
    V, F = added_r.shape[-1], factor_r.shape[-1]
    identity = torch.eye(F, dtype=factor_r.dtype, device=factor_r.device).expand_as(factor_r[0])
    return _scan(pad(identity, (V, 0)), pad(added_r, (0, F)), factor_r, starts_r)


def _product(factor: Tensor, state: Tensor, *, transposed: bool = False) -> Tensor:
    if factor.shape[-1] == 1:
        return factor * state
    return (factor.mT if transposed else factor) @ state


def _summed(x: Tensor, shard: SequenceShard) -> Tensor:
    total = shard.exchange_rows(x.reshape(1, -1), lambda row_R1C: row_R1C.sum(0).expand_as(row_R1C))
    return total.view_as(x)
