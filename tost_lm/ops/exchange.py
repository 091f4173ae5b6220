"""States that sequence ranks pass on: one exchange of constant size forward, one backward.

The state of a document at the end of a rank's tokens is `advance`(the state at their start) + what these tokens add.
Shapes: N documents, n of them with tokens on this rank, R ranks; states [N, …].
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tost_lm.ops.sequence_shard import LocalDocuments, SequenceShard


class Advance(Protocol):
    """A linear function of states: the state some tokens later, without what these tokens add."""

    def forward(self, state_N: Tensor, tokens: Sequence[int]) -> Tensor:
        """Advance each row by its number of tokens."""
        ...

    def backward(self, d_state_N: Tensor, tokens: Sequence[int]) -> Tensor:
        """The transposed function."""
        ...

    def gradients(self, state_N: Tensor, d_state_N: Tensor, tokens: Sequence[int]) -> tuple[Tensor, ...]:
        """Gradients of the parameters, from states before and gradients after the tokens."""
        ...


class Decay:
    """A sum of each head that is multiplied by exp(log_decay) at each token; states [N, H, …]."""

    def __init__(self, log_decay_H: Tensor):
        self.log_decay_H = log_decay_H

    def forward(self, state_N: Tensor, tokens: Sequence[int]) -> Tensor:
        faded_NH = (self._column(tokens) * self.log_decay_H).exp()
        return faded_NH.view(*faded_NH.shape, *(1,) * (state_N.dim() - 2)) * state_N

    def backward(self, d_state_N: Tensor, tokens: Sequence[int]) -> Tensor:
        return self.forward(d_state_N, tokens)

    def gradients(self, state_N: Tensor, d_state_N: Tensor, tokens: Sequence[int]) -> tuple[Tensor, ...]:
        passed_NH = (self.forward(state_N, tokens) * d_state_N).flatten(2).sum(-1)
        return ((self._column(tokens) * passed_NH).sum(0),)

    def _column(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor(tokens, device=self.log_decay_H.device)[:, None]


class Shift:
    """The last P tokens, oldest first; states [N, P, C]."""

    def forward(self, state_N: Tensor, tokens: Sequence[int]) -> Tensor:
        return torch.stack([_shifted(state, -count) for state, count in zip(state_N, tokens, strict=True)])

    def backward(self, d_state_N: Tensor, tokens: Sequence[int]) -> Tensor:
        return torch.stack([_shifted(d_state, count) for d_state, count in zip(d_state_N, tokens, strict=True)])

    def gradients(self, state_N: Tensor, d_state_N: Tensor, tokens: Sequence[int]) -> tuple[Tensor, ...]:
        return ()


def exchange(
    shard: SequenceShard,
    local: LocalDocuments,
    advance: Callable[..., Advance],
    initial_N: Tensor,
    added_n: Tensor,
    *parameters: Tensor,
    per_document: bool,
) -> tuple[Tensor, Tensor]:
    """The states before this rank's tokens, [n, …], and the final states, [N, …]; differentiable.

    Args:
        advance: called with `parameters`.
        initial_N: the states before the sequences. They, the final states and the gradients of both are equal on all
            ranks.
        added_n: what this rank's tokens add, at the end of each of its documents' tokens.
        per_document: the initial or the final states are used. Otherwise ranks send a single row each.
    """
    return _Exchange.apply(shard, local, advance, per_document, initial_N, added_n, *parameters)  # pyright: ignore[reportReturnType]


class _Exchange(torch.autograd.Function):
    """All ranks add up in the same order, so that they compute the same states."""

    @staticmethod
    def forward(
        ctx, shard: SequenceShard, local: LocalDocuments, advance, per_document, initial_N, added_n, *parameters
    ):
        ctx.shard, ctx.local, ctx.advance, ctx.per_document = shard, local, advance, per_document
        forward, here, crossing = advance(*parameters).forward, shard.split.rank, _crossing(local, 0)
        added_R = shard.all_gather(_rows(added_n, local) if per_document else added_n[-1:])
        before_n = forward(initial_N[local.documents], local.before)
        for rank in local.earlier_ranks:
            row_n = (added_R[rank][local.documents] if per_document else added_R[rank])[crossing]
            before_n[crossing] += forward(row_n, [sum(shard.split.lengths[rank + 1 : here])] * len(row_n))
        final_N = initial_N.clone()
        if per_document:
            tokens_RN = shard.split.tokens_of(local)
            final_N = forward(initial_N, local.whole_lengths)
            for rank, added_N in enumerate(added_R):
                final_N += forward(added_N, _totals(tokens_RN[rank + 1 :], len(final_N)))
        ctx.save_for_backward(before_n, *parameters)
        return before_n, final_N

    @staticmethod
    @once_differentiable
    def backward(ctx, d_before_n: Tensor, d_final_N: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        before_n, *parameters = ctx.saved_tensors
        shard, local = ctx.shard, ctx.local
        advance, here, crossing = ctx.advance(*parameters), shard.split.rank, _crossing(local, -1)
        d_before_R = shard.all_gather(_rows(d_before_n, local) if ctx.per_document else d_before_n[:1])
        d_added_n, d_initial_N = torch.zeros_like(before_n), d_final_N
        for rank in local.later_ranks:
            row_n = (d_before_R[rank][local.documents] if ctx.per_document else d_before_R[rank])[crossing]
            d_added_n[crossing] += advance.backward(row_n, [sum(shard.split.lengths[here + 1 : rank])] * len(row_n))
        if ctx.per_document:
            tokens_RN = shard.split.tokens_of(local)
            d_added_n += advance.backward(d_final_N, _totals(tokens_RN[here + 1 :], len(d_final_N)))[local.documents]
            d_initial_N = advance.backward(d_final_N, local.whole_lengths)
            for rank, d_before_N in enumerate(d_before_R):
                d_initial_N += advance.backward(d_before_N, _totals(tokens_RN[:rank], len(d_final_N)))
        # Over this rank's tokens only: ranks sum the gradients of parameters.
        d_parameters = advance.gradients(before_n, d_added_n, local.lengths)
        return None, None, None, None, d_initial_N, d_added_n, *d_parameters


def _crossing(local: LocalDocuments, packed: int) -> slice:
    """The documents here that have tokens on earlier ranks (`packed` 0) or on later ranks (−1): unpacked, all."""
    return slice(packed, packed + 1 or None) if local.packed else slice(None)


def _rows(x_n: Tensor, local: LocalDocuments) -> Tensor:
    """A row for each document of the whole sequence, 0 for documents without tokens on this rank."""
    x_N = x_n.new_zeros(len(local.whole_lengths), *x_n.shape[1:])
    x_N[local.documents] = x_n
    return x_N


def _totals(tokens_RN: Sequence[Sequence[int]], documents: int) -> list[int]:
    """Tokens of each document on these ranks."""
    return [sum(tokens_N[n] for tokens_N in tokens_RN) for n in range(documents)]


def _shifted(x_PC: Tensor, rows: int) -> Tensor:
    """Moved down by `rows`, or up by −rows, with zeros for what is missing."""
    moved = torch.zeros_like(x_PC)
    if abs(rows) < len(x_PC):
        start, end = max(0, rows), len(x_PC) + min(0, rows)
        moved[start:end] = x_PC[start - rows : end - rows]
    return moved
