"""One chunk of one document, the memory its computation reuses from chunk to chunk, and running sums over it."""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from tost_lm.ops.layout import Layout
from tost_lm.ops.naive import statistics_dtype
from tost_lm.ops.phases import Scoring


class Scratch:
    """Tensors of one chunk's size, handed out anew for each chunk: fresh memory would cost more than the arithmetic."""

    def __init__(self, w_MHD: Tensor, layout: Layout):
        longest = min(layout.chunk_tokens, len(w_MHD))
        self._empty = lambda: w_MHD.new_empty(longest, *w_MHD.shape[1:], dtype=statistics_dtype(w_MHD))
        self._tensors: list[Tensor] = []
        self._used = 0

    def reset(self) -> None:
        """A new chunk: everything handed out before is free again."""
        self._used = 0

    def take(self, tokens: int) -> Tensor:
        """An uninitialised tensor [t, H, D]."""
        if self._used == len(self._tensors):
            self._tensors.append(self._empty())
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
        """Uninitialised [t, H, D] in the statistics dtype, valid until the next chunk."""
        return self._scratch.take(self._length)

    def read(self, x_MHD: Tensor) -> Tensor:
        """The chunk's tokens in the statistics dtype; not to be written to."""
        x = x_MHD[self.tokens]
        return x if x.dtype == statistics_dtype(x) else self.new().copy_(x)

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        """x · y in scratch memory."""
        return torch.mul(x, y, out=self.new())

    def score_scale(self, scoring: Scoring, channels: int) -> Tensor | float:
        """What Σ_d w²/S1 counts in the score: 1, or [t, 1] under `energy-mean`."""
        if scoring.membership != "energy-mean":
            return 1.0
        first = scoring.count_N[self.document] + self._earlier_in_document + 1
        count_t = first + torch.arange(self._length, device=scoring.temp_H.device)
        return (count_t.to(scoring.temp_H.dtype) / channels)[:, None]

    def score_bias(self, scoring: Scoring, channels: int) -> Tensor | float:
        """What the bias adds to the score, [t, H] or 0."""
        if scoring.bias_BHT is None:
            return 0.0
        b, t = divmod(self.tokens.start, scoring.bias_BHT.shape[-1])
        return scoring.bias_scale(channels) * scoring.bias_BHT[b, :, t : t + self._length].T


def chunks(w_MHD: Tensor, layout: Layout, newest_first: bool = False) -> Iterator[Chunk]:
    """All chunks in order of time, or against it. Scratch memory of one is reused by the next."""
    scratch = Scratch(w_MHD, layout)
    rows = zip(layout.document_K.tolist(), layout.start_K.tolist(), layout.end_K.tolist(), strict=True)
    numbered = list(enumerate(rows))
    for index, (document, start, end) in reversed(numbered) if newest_first else numbered:
        scratch.reset()
        yield Chunk(index, document, start, end, layout, scratch)


ROWS_IN_STEP = 16


def running_sum_(x: Tensor, carry: Tensor, newest_first: bool = False) -> Tensor:
    """In place: sums over time up to and including each token, or from each token on, on top of `carry`.

    Args:
        x: [t, H, D].
        carry: [H, D], the sum over what comes before, or after.
        newest_first: sum from each token on.

    Returns:
        The sum of x alone, [H, D].
    """
    if not x.is_cpu:
        sums = x.flip(0).cumsum(0).flip(0) if newest_first else x.cumsum(0)
        total = sums[0 if newest_first else -1].clone()
        x.copy_(sums.add_(carry))
        return total
    # torch.cumsum over the first dimension works scalar by scalar here. Whole rows, all groups of 16 tokens in step
    # and then group after group, took 0.6 of its time on two cores and 0.4 on one.
    groups = len(x) // ROWS_IN_STEP
    rest = x[groups * ROWS_IN_STEP :].unbind(0)
    blocks = [(row, row) for row in rest]
    total = sum(rest, torch.zeros_like(carry, dtype=x.dtype))
    if groups:
        grouped = x[: groups * ROWS_IN_STEP].unflatten(0, (groups, ROWS_IN_STEP))
        steps = grouped.unbind(1)[:: -1 if newest_first else 1]
        for earlier, row in pairwise(steps):
            row.add_(earlier)
        total = total + steps[-1].sum(0)
        blocks = [*zip(grouped.unbind(0), steps[-1].unbind(0), strict=True), *blocks]
    for block, last_row in reversed(blocks) if newest_first else blocks:
        block.add_(carry)
        carry = last_row
    return total
