"""Samples of a corpus: T labels each, with the token before every label as its input.

A sample is told as spans of the concatenated train split, a pure function of (seed, number), so that resuming needs no
state and nothing is read before it is wanted. Shape suffixes: N samples, S spans.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tost_lm.data.permutation import Order, permuted

if TYPE_CHECKING:
    import numpy as np


class Spans(NamedTuple):
    """What fills samples, one after another."""

    start: "np.ndarray"
    """First label in the concatenated tokens, int64 [S]; −1: filling, end-of-text ids without labels."""
    length: "np.ndarray"
    """Labels, int64 [S], each > 0; no span reaches over the end of a sample."""
    fresh: "np.ndarray"
    """Whether the first input is the end-of-text id and not the token before the first label, bool [S]."""


class Samples(Protocol):
    """The samples of one corpus, epoch after epoch; each epoch has them all, in an order of its own."""

    def __len__(self) -> int:
        """Samples of an epoch."""
        ...

    def spans(self, sample_N: "np.ndarray") -> Spans:
        """What fills the samples of these running numbers, which ascend from 0 through all epochs."""
        ...


class ConcatenatedSamples:
    """As published: sample w of an epoch has the tokens [w·T, (w + 1)·T) as labels, whatever documents they are of.

    Every token is a label once in an epoch. What the tokens leave of the last sample is filling.
    """

    def __init__(self, tokens: int, sequence_tokens: int, corpus: int, seed: int) -> None:
        self._tokens, self._sequence_tokens = tokens, sequence_tokens
        self._corpus, self._seed = corpus, seed

    def __len__(self) -> int:
        return -(-self._tokens // self._sequence_tokens)

    def spans(self, sample_N: "np.ndarray") -> Spans:
        import numpy as np

        epoch_N, place_N = np.divmod(sample_N, len(self))
        window_N = np.empty_like(place_N)
        for epoch, chosen in runs(epoch_N):
            window_N[chosen] = permuted(place_N[chosen], len(self), Order.WINDOWS, self._corpus, epoch, self._seed)
        start_N = window_N * self._sequence_tokens
        length_N = np.minimum(self._tokens - start_N, self._sequence_tokens)
        start_S = np.stack([start_N, np.full_like(start_N, -1)], 1).ravel()
        length_S = np.stack([length_N, self._sequence_tokens - length_N], 1).ravel()
        there = length_S > 0
        return Spans(start_S[there], length_S[there], start_S[there] <= 0)


def runs(x_N: "np.ndarray") -> Iterator[tuple[int, slice]]:
    """Each stretch of equal neighbours: the value, and where they are."""
    import numpy as np

    edges = [0, *(np.flatnonzero(np.diff(x_N)) + 1).tolist(), len(x_N)]
    for start, end in pairwise(edges):
        yield int(x_N[start]), slice(start, end)
