"""Samples of a corpus: T labels each; the input of a label is the token before it.

A sample is a list of segments of the concatenated split. It is a pure function of the seed and the sample's number, so
resuming needs no state and only requested samples are read. Shape suffixes: N samples, S segments.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tost_lm.data.permutation import Order, permuted

if TYPE_CHECKING:
    import numpy as np


class Segments(NamedTuple):
    """Contiguous ranges of labels that fill samples, in order."""

    start: "np.ndarray"
    """Index of the first label in the concatenated tokens, int64 [S]; −1: padding, end-of-text ids without labels."""
    length: "np.ndarray"
    """Number of labels, int64 [S], > 0; no segment crosses the end of a sample."""
    fresh: "np.ndarray"
    """Whether the first input is the end-of-text id instead of the token before the first label, bool [S]."""


class Samples(Protocol):
    """The samples of one corpus. Each epoch has every sample once, in an order of its own."""

    def __len__(self) -> int:
        """Samples per epoch."""
        ...

    def segments(self, sample_N: "np.ndarray") -> Segments:
        """The segments of the samples with these numbers, which count from 0 over all epochs."""
        ...


class ConcatenatedSamples:
    """As published: sample w has the tokens [w·T, (w + 1)·T) as labels, across document boundaries.

    Every token is a label once per epoch. The last sample is padded.
    """

    def __init__(self, tokens: int, seq_len: int, corpus: int, seed: int) -> None:
        self._tokens, self._seq_len = tokens, seq_len
        self._corpus, self._seed = corpus, seed

    def __len__(self) -> int:
        return -(-self._tokens // self._seq_len)

    def segments(self, sample_N: "np.ndarray") -> Segments:
        import numpy as np

        epoch_N, position_N = np.divmod(sample_N, len(self))
        window_N = np.empty_like(position_N)
        for epoch, chosen in runs(epoch_N):
            window_N[chosen] = permuted(position_N[chosen], len(self), Order.WINDOWS, self._corpus, epoch, self._seed)
        start_N = window_N * self._seq_len
        length_N = np.minimum(self._tokens - start_N, self._seq_len)
        start_S = np.stack([start_N, np.full_like(start_N, -1)], 1).ravel()
        length_S = np.stack([length_N, self._seq_len - length_N], 1).ravel()
        kept = length_S > 0
        return Segments(start_S[kept], length_S[kept], start_S[kept] <= 0)


def runs(x_N: "np.ndarray") -> Iterator[tuple[int, slice]]:
    """Each run of equal neighbours: the value and its slice."""
    import numpy as np

    edges = [0, *(np.flatnonzero(np.diff(x_N)) + 1).tolist(), len(x_N)]
    for start, end in pairwise(edges):
        yield int(x_N[start]), slice(start, end)
