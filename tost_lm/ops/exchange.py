"""Sums over the tokens of earlier or later sequence ranks, in one exchange of constant size.

Ranks sum rows of statistics column by column, so that each rank may do so in some columns for all of them. Shapes: N
documents, n of them with tokens on this rank, R ranks, C columns.
"""

from itertools import pairwise

import torch
from torch import Tensor

from tost_lm.ops.layout import LocalDocuments, SequenceShard, documents_begin


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
        row_n = here_n[:1] if reverse else here_n[-1:]
        starts = [rank for rank, begins in enumerate(documents_begin(lengths, documents)) if begins]
    else:
        row_n, starts = here_n.new_zeros(len(documents), *here_n.shape[1:]), [0]
        row_n[local.documents] = here_n

    def scan(row_Rn: Tensor) -> Tensor:
        """The sums before each rank, with `per_document` also those over all ranks: [R, 1 or 2, n, c]."""
        parts = (row_Rn.flip(0) if reverse else row_Rn).split([b - a for a, b in pairwise([*starts, len(row_Rn)])])
        up_to_Rn = torch.cat([_prefix_sums(part_rn) for part_rn in parts])
        before_Rn = torch.cat([torch.zeros_like(up_to_Rn[:1]), up_to_Rn[:-1]])
        before_Rn = before_Rn.flip(0) if reverse else before_Rn
        return torch.stack([before_Rn, up_to_Rn[-1:].expand_as(before_Rn)] if per_document else [before_Rn], 1)

    sum_n, *total = shard.exchange_rows(row_n, scan)
    if not one_row:
        return sum_n[local.documents], total[0] if total else None
    outside_n = torch.zeros_like(here_n)
    if local.after[-1] if reverse else local.before[0]:
        outside_n[-1 if reverse else 0] = sum_n[0]
    return outside_n, None


def _prefix_sums(row_Rn: Tensor) -> Tensor:
    """The sum of the rows up to each, in ⌈log₂ R⌉ steps. Each adds to a row's sum the one `distance` rows before."""
    distance = 1
    while distance < len(row_Rn):
        row_Rn = torch.cat([row_Rn[:distance], row_Rn[distance:] + row_Rn[:-distance]])
        distance *= 2
    return row_Rn
