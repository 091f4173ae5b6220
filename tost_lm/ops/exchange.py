"""Sums over the tokens of earlier or later sequence ranks, in one exchange of constant size.

Ranks sum rows of statistics column by column, so that each rank may do so in some columns for all of them. Shapes: N
documents, n of them with tokens on this rank, R ranks, C columns.
"""

from itertools import accumulate

import torch
from torch import Tensor

from tost_lm.ops.layout import LocalDocuments, SequenceShard, cached_on_device, to_device


def exclusive_scan(
    shard: SequenceShard,
    local: LocalDocuments,
    here_n: Tensor,
    *,
    reverse: bool = False,
    per_document: bool,
) -> tuple[Tensor, Tensor | None]:
    """Sums over the tokens of earlier ranks (with `reverse`: of later ranks), in one exchange. Not differentiable.

    Args:
        local: the documents of this rank.
        here_n: sums over the tokens of this rank, a row for each of its n documents, [n, …, C].
        reverse: sum from the last token to the first.
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

    def scan(row_Rn: Tensor) -> Tensor:
        """The sums before each rank, with `per_document` also those over all ranks: [R, 1 or 2, n, c]."""
        sum_R1n = _prefix_sums(row_Rn.flip(0) if reverse else row_Rn, first_R1)
        sum_Rn = sum_R1n[:-1].flip(0) if reverse else sum_R1n[:-1]
        return torch.stack([sum_Rn, sum_R1n[-1:].expand_as(sum_Rn)] if per_document else [sum_Rn], 1)

    sum_n, *total = shard.exchange_rows(row_n, scan)
    if not one_row:
        return sum_n[local.documents], total[0] if total else None
    outside_n = torch.zeros_like(here_n)
    outside_n[-1 if reverse else 0] = sum_n[0]
    return outside_n, None


def _prefix_sums(row_Rn: Tensor, first_R1: Tensor | None) -> Tensor:
    """The sum over earlier ranks at each border of ranks, [R + 1, n, c]: border r is before rank r.

    It takes ⌈log₂ R⌉ steps. Each adds to a border's sum the one `distance` borders before.

    Args:
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
        sum_R1n = torch.cat([sum_R1n[:distance], sum_R1n[distance:] + counted(sum_R1n[:-distance], distance)])
        distance *= 2
    return sum_R1n


@cached_on_device(maxsize=32)
def _first_ranks(lengths: tuple[int, ...], documents: tuple[int, ...], device: torch.device) -> Tensor:
    """The rank with the first token of the document that continues or starts at each border of ranks, [R + 1]."""
    border_R1, start_N1 = (torch.tensor((0, *accumulate(x))) for x in (lengths, documents))
    start_R1 = start_N1[torch.searchsorted(start_N1, border_R1, right=True) - 1]
    return to_device(torch.searchsorted(border_R1, start_R1, right=True) - 1, device)
