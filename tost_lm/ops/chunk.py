"""One chunk of one document, the scratch memory that chunks share, and running sums over a chunk."""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from tost_lm.ops.layout import Layout
from tost_lm.ops.naive import statistics_dtype
from tost_lm.ops.phases import Scoring


class Scratch:
    """Tensors of one chunk's size that all chunks reuse: allocating new memory costs more time than the arithmetic."""

    def __init__(self, w_MHD: Tensor, layout: Layout):
        longest = min(layout.chunk_tokens, len(w_MHD))
        self._allocate = lambda: w_MHD.new_empty(longest, *w_MHD.shape[1:], dtype=statistics_dtype(w_MHD))
        self._tensors: list[Tensor] = []
        self._used = 0

    def reset(self) -> None:
        """Start a new chunk: all tensors are free again."""
        self._used = 0

    def empty(self, tokens: int) -> Tensor:
        """An uninitialised tensor [t, H, D]."""
        if self._used == len(self._tensors):
            self._tensors.append(self._allocate())
        self._used += 1
        return self._tensors[self._used - 1][:tokens]


class Chunk:
    """Tokens `tokens` of document `document`."""

    def __init__(self, index: int, document: int, start: int, end: int, layout: Layout, scratch: Scratch):
        self.index, self.document, self.tokens = index, document, slice(start, end)
        self.is_first = start == layout.offsets[document]
        self.is_last = end == layout.offsets[document + 1]
        self._length = end - start
        self._earlier_in_document = start - layout.offsets[document]
        self._scratch = scratch

    def new(self) -> Tensor:
        """An uninitialised tensor [t, H, D] in the statistics dtype, valid until the next chunk."""
        return self._scratch.empty(self._length)

    def read(self, x_MHD: Tensor) -> Tensor:
        """The chunk's tokens in the statistics dtype; do not modify them."""
        x = x_MHD[self.tokens]
        return x if x.dtype == statistics_dtype(x) else self.new().copy_(x)

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        """x · y in scratch memory."""
        return torch.mul(x, y, out=self.new())

    def score_scale(self, scoring: Scoring, channels: int) -> Tensor | float:
        """The factor of Σ_d w²/S1 in the score: 1, or [t, 1] under `energy-mean`."""
        if scoring.membership != "energy-mean":
            return 1.0
        first = scoring.count_N[self.document] + self._earlier_in_document + 1
        count_t = first + torch.arange(self._length, device=scoring.temp_H.device)
        return (count_t.to(scoring.temp_H.dtype) / channels)[:, None]

    def score_bias(self, scoring: Scoring, channels: int) -> Tensor | float:
        """The bias in the score, [t, H] or 0."""
        if scoring.bias_BHT is None:
            return 0.0
        b, t = divmod(self.tokens.start, scoring.bias_BHT.shape[-1])
        return scoring.bias_scale(channels) * scoring.bias_BHT[b, :, t : t + self._length].T


def chunks(w_MHD: Tensor, layout: Layout, newest_first: bool = False) -> Iterator[Chunk]:
    """All chunks, oldest first or newest first. The next chunk reuses the scratch memory of this one."""
    scratch = Scratch(w_MHD, layout)
    rows = zip(layout.document_K.tolist(), layout.start_K.tolist(), layout.end_K.tolist(), strict=True)
    numbered = list(enumerate(rows))
    for index, (document, start, end) in reversed(numbered) if newest_first else numbered:
        scratch.reset()
        yield Chunk(index, document, start, end, layout, scratch)


SCAN_ROWS = 16


def running_sum_(x: Tensor, carry: Tensor, newest_first: bool = False) -> Tensor:
    """In place: sums over time up to and including each token, or from each token on, on top of `carry`.

    Args:
        x: [t, H, D].
        carry: [H, D], the sum over the tokens before, or after.
        newest_first: sum from each token on.

    Returns:
        The sum of x alone, [H, D].
    """
    if not x.is_cpu:
        sums = x.flip(0).cumsum(0).flip(0) if newest_first else x.cumsum(0)
        total = sums[0 if newest_first else -1].clone()
        x.copy_(sums.add_(carry))
        return total
    # On a CPU torch.cumsum over the first dimension adds one scalar at a time. Adding whole rows takes a fifth of its
    # time: first within all groups of 16 rows at once, then over the groups, then the sums of earlier groups to each.
    groups = len(x) // SCAN_ROWS
    if groups < 2:
        rows = x.unbind(0)[:: -1 if newest_first else 1]
        for earlier, row in pairwise(rows):
            row.add_(earlier)
        total = rows[-1].clone()
        x.add_(carry)
        return total
    grouped, rest = x[: groups * SCAN_ROWS].unflatten(0, (groups, SCAN_ROWS)), x[groups * SCAN_ROWS :]
    rest_total = running_sum_(rest, carry, newest_first) if newest_first and len(rest) else 0
    steps = grouped.unbind(1)[:: -1 if newest_first else 1]
    for earlier, row in pairwise(steps):
        row.add_(earlier)
    sums_of_groups = steps[-1].clone()
    carry = carry + rest_total
    total = running_sum_(sums_of_groups, carry, newest_first)
    first, later, sums = (
        (-1, grouped[:-1], sums_of_groups[1:]) if newest_first else (0, grouped[1:], sums_of_groups[:-1])
    )
    grouped[first].add_(carry)
    later.add_(sums[:, None])
    if len(rest) and not newest_first:
        rest_total = running_sum_(rest, carry + total)
    return total + rest_total
