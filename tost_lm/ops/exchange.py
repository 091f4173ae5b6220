"""Sums and states that sequence ranks pass on: one exchange of constant size forward, one backward.

The state of a document at the end of a rank's tokens is `advance`(the state at their start) + what these tokens add; a
plain sum does not change from token to token. Ranks scan rows of statistics column by column, so that each rank may
scan some columns for all of them. Shapes: N documents, n of them with tokens on this rank, R ranks, C columns; states
[N, …, C].
"""

from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from tost_lm.ops.layout import LocalDocuments, SequenceShard, cached_on_device, int64_tensor, to_device


class Sum:
    """A linear function of each column of states: the state some tokens later, without what these tokens add. This one
    is that of a sum in each column, which does not change; states [N, C]."""

    def of_columns(self, columns: slice) -> "Sum":
        """The function of these columns."""
        return self

    def forward(self, state_N: Tensor, tokens_N: Tensor) -> Tensor:
        """Advance each row by its number of tokens. Rows may have several dimensions."""
        return state_N

    def backward(self, d_state_N: Tensor, tokens_N: Tensor) -> Tensor:
        """The transposed function."""
        return d_state_N

    def gradients(self, state_N: Tensor, d_state_N: Tensor, tokens_N: Tensor) -> tuple[Tensor, ...]:
        """Gradients of the parameters, from states before and gradients after the tokens."""
        return ()


class Decay(Sum):
    """A sum in each column that is multiplied by exp(log_decay) at each token; states [N, C]."""

    def __init__(self, log_decay_C: Tensor):
        self.log_decay_C = log_decay_C

    def of_columns(self, columns: slice) -> "Decay":
        return Decay(self.log_decay_C[columns])

    def forward(self, state_N: Tensor, tokens_N: Tensor) -> Tensor:
        return (tokens_N[..., None] * self.log_decay_C).exp() * state_N

    def backward(self, d_state_N: Tensor, tokens_N: Tensor) -> Tensor:
        return self.forward(d_state_N, tokens_N)

    def gradients(self, state_N: Tensor, d_state_N: Tensor, tokens_N: Tensor) -> tuple[Tensor, ...]:
        return ((tokens_N[..., None] * self.forward(state_N, tokens_N) * d_state_N).sum(0),)


class Shift(Sum):
    """The last P tokens, oldest first; states [N, P, C]."""

    def forward(self, state_N: Tensor, tokens_N: Tensor) -> Tensor:
        P = state_N.shape[-2]
        source_NP = torch.arange(P, 2 * P, device=state_N.device) + tokens_N.clamp(-P, P)[..., None]
        return torch.take_along_dim(pad(state_N, (0, 0, P, P)), source_NP[..., None], -2)

    def backward(self, d_state_N: Tensor, tokens_N: Tensor) -> Tensor:
        return self.forward(d_state_N, -tokens_N)


def exchange(
    shard: SequenceShard,
    local: LocalDocuments,
    advance: Callable[..., Sum],
    initial_N: Tensor,
    added_n: Tensor,
    *parameters: Tensor,
    per_document: bool,
) -> tuple[Tensor, Tensor | None]:
    """The states before this rank's tokens, [n, …, C], and the final states, [N, …, C]; differentiable.

    Args:
        advance: called with `parameters`.
        initial_N: the states before the sequences. They, the final states and the gradients of both are equal on all
            ranks.
        added_n: what this rank's tokens add, at the end of each of its documents' tokens.
        per_document: the initial or the final states are used. Otherwise `initial_N` is 0 and the final states None.
    """
    return _Exchange.apply(shard, local, advance, per_document, initial_N, added_n, *parameters)  # pyright: ignore[reportReturnType]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, shard: SequenceShard, local: LocalDocuments, advance, per_document, initial_N, added_n, *parameters
    ):
        ctx.shard, ctx.local, ctx.advance, ctx.per_document = shard, local, advance, per_document
        function = advance(*parameters)
        before_n, final_N = exclusive_scan(shard, local, function, added_n, per_document=per_document)
        if final_N is not None:
            tokens_n, tokens_N = (int64_tensor(x, added_n.device) for x in (local.before, local.whole_lengths))
            before_n = before_n + function.forward(initial_N[local.documents], tokens_n)
            final_N = final_N + function.forward(initial_N, tokens_N)
        ctx.save_for_backward(before_n, *parameters)
        return before_n, final_N

    @staticmethod
    @once_differentiable
    def backward(ctx, d_before_n: Tensor, d_final_N: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        before_n, *parameters = ctx.saved_tensors
        local, function = ctx.local, ctx.advance(*parameters)
        d_added_n, d_initial_N = exclusive_scan(
            ctx.shard, local, function, d_before_n, reverse=True, per_document=ctx.per_document
        )
        if d_initial_N is not None:
            tokens_n, tokens_N = (int64_tensor(x, d_added_n.device) for x in (local.after, local.whole_lengths))
            d_added_n = d_added_n + function.backward(d_final_N[local.documents], tokens_n)
            d_initial_N = d_initial_N + function.backward(d_final_N, tokens_N)
        # Over this rank's tokens only: ranks sum the gradients of parameters.
        d_parameters = function.gradients(before_n, d_added_n, int64_tensor(local.lengths, d_added_n.device))
        return None, None, None, None, d_initial_N, d_added_n, *d_parameters


def exclusive_scan(
    shard: SequenceShard,
    local: LocalDocuments,
    advance: Sum,
    here_n: Tensor,
    *,
    reverse: bool = False,
    per_document: bool,
) -> tuple[Tensor, Tensor | None]:
    """Sums over the tokens of earlier ranks (with `reverse`: of later ranks), in one exchange. Not differentiable.

    Args:
        local: the documents of this rank.
        here_n: sums over the tokens of this rank, a row for each of its n documents, [n, …, C].
        reverse: scan from the last token to the first, with the transposed function.
        per_document: every rank needs the total of every document. Otherwise ranks exchange only the documents that
            cross ranks.

    Returns:
        For each of the n documents, the sum before (with `reverse`: after) its tokens on this rank, [n, …, C]. With
        `per_document` also the sum over all tokens of each of the N documents, [N, …, C], equal bits on all ranks.
    """
    # In reverse, ranks and documents count from the last.
    lengths, documents = (x[::-1] if reverse else x for x in (shard.split.lengths, local.whole_lengths))
    one_row = local.packed and not per_document
    if one_row:
        row_n, first_R1 = here_n[:1] if reverse else here_n[-1:], _first_ranks(lengths, documents, here_n.device)
    else:
        row_n, first_R1 = here_n.new_zeros(len(documents), *here_n.shape[1:]), None
        row_n[local.documents] = here_n
    tokens_R1n = _tokens_before(lengths, documents if local.packed and per_document else None, here_n.device)

    def scan(row_Rn: Tensor, columns: slice) -> Tensor:
        """The sums before each rank, with `per_document` also those over all ranks: [R, 1 or 2, n, …, c]."""
        function = advance.of_columns(columns)
        if reverse:
            sum_R1n = _prefix_sums(row_Rn.flip(0), function.backward, tokens_R1n.flip(1), first_R1)
            sum_Rn = sum_R1n[:-1].flip(0)
        else:
            sum_R1n = _prefix_sums(row_Rn, function.forward, tokens_R1n, first_R1)
            sum_Rn = sum_R1n[:-1]
        return torch.stack([sum_Rn, sum_R1n[-1:].expand_as(sum_Rn)] if per_document else [sum_Rn], 1)

    sum_n, *total = shard.exchange_rows(row_n, scan)
    if not one_row:
        return sum_n[local.documents], total[0] if total else None
    outside_n = torch.zeros_like(here_n)
    outside_n[-1 if reverse else 0] = sum_n[0]
    return outside_n, None


def _prefix_sums(
    row_Rn: Tensor, advance: Callable[[Tensor, Tensor], Tensor], tokens_R1n: Tensor, first_R1: Tensor | None
) -> Tensor:
    """The sum over earlier ranks at each border of ranks, [R + 1, n, …, c]: border r is before rank r.

    It takes ⌈log₂ R⌉ steps. Each adds to a border's sum the one `distance` borders before.

    Args:
        tokens_R1n: tokens before each border.
        first_R1: the first rank that counts at each border; None: all count.
    """

    def counted(sum_Rn: Tensor, distance: int) -> Tensor:
        """0 where the document at a border does not reach `distance` borders back."""
        if first_R1 is None:
            return sum_Rn
        reaches_R = torch.arange(len(sum_Rn), device=sum_Rn.device) > first_R1[distance:]
        return sum_Rn.where(reaches_R.view(-1, *[1] * (sum_Rn.dim() - 1)), 0)

    sum_R1n = counted(torch.cat([torch.zeros_like(row_Rn[:1]), row_Rn]), 0)
    distance = 1
    while distance < len(row_Rn):
        advanced_Rn = advance(sum_R1n[:-distance], tokens_R1n[distance:] - tokens_R1n[:-distance])
        sum_R1n = torch.cat([sum_R1n[:distance], sum_R1n[distance:] + counted(advanced_Rn, distance)])
        distance *= 2
    return sum_R1n


@cached_on_device(maxsize=32)
def _first_ranks(lengths: tuple[int, ...], documents: tuple[int, ...], device: torch.device) -> Tensor:
    """The rank with the first token of the document that continues or starts at each border of ranks, [R + 1]."""
    border_R1, start_N1 = (torch.tensor((0, *accumulate(x))) for x in (lengths, documents))
    start_R1 = start_N1[torch.searchsorted(start_N1, border_R1, right=True) - 1]
    return to_device(torch.searchsorted(border_R1, start_R1, right=True) - 1, device)


@cached_on_device(maxsize=8)
def _tokens_before(lengths: tuple[int, ...], documents: tuple[int, ...] | None, device: torch.device) -> Tensor:
    """Tokens before each border of ranks: those of each of N packed documents, [R + 1, N], or all, [R + 1, 1]."""
    border_R11 = torch.tensor((0, *accumulate(lengths)))[:, None]
    if documents is None:
        return to_device(border_R11, device)
    length_N = torch.tensor(documents)
    return to_device((border_R11 - (length_N.cumsum(0) - length_N)).clamp(min=0).minimum(length_N), device)
