"""Samples of a corpus: T labels each; the input of a label is the token before it.

A sample is a list of segments of the concatenated split. It is a pure function of the seed and the sample's number, so
resuming needs no state and only requested samples are read. Shape suffixes: N samples, S segments.

Permutations of [0, n) need no table: any elements of an order of 10⁹ samples are computed directly.
"""

from collections.abc import Iterator
from enum import IntEnum
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np

ROUNDS = 8


class Order(IntEnum):
    """The first number of a key: what is permuted. Different orders of a run get different keys."""

    WINDOWS = 0
    BLOCKS = 1
    GROUPS = 2
    SAMPLES_OF_GROUP = 3
    MIXTURE = 4


def permuted(index_N: "np.ndarray", n: int, *key: int) -> "np.ndarray":
    """The image of each index under the permutation of [0, n) that `key` selects, int64 [N].

    A Feistel network over the smallest power of two ≥ n, applied again to values outside [0, n) (cycle walking). The
    numbers of a key are non-negative.
    """
    import numpy as np

    bits = max((n - 1).bit_length(), 2)
    value_N = index_N.astype(np.uint64)
    outside_N = np.ones(len(value_N), dtype=bool)
    while outside_N.any():
        value_N[outside_N] = _shuffle_bits(value_N[outside_N], bits, _round_keys(key))
        outside_N = value_N >= n
    return value_N.astype(np.int64)


def _shuffle_bits(value_N: "np.ndarray", bits: int, round_keys: "np.ndarray") -> "np.ndarray":
    import numpy as np

    low_bits = np.uint64(bits // 2)
    low_mask, high_mask = np.uint64((1 << bits // 2) - 1), np.uint64((1 << bits - bits // 2) - 1)
    low_N, high_N = value_N & low_mask, value_N >> low_bits
    for low_key, high_key in round_keys.reshape(-1, 2):
        low_N ^= _mixed(high_N + low_key) & low_mask
        high_N ^= _mixed(low_N + high_key) & high_mask
    return high_N << low_bits | low_N


def _mixed(x_N: "np.ndarray") -> "np.ndarray":
    """The finalizer of SplitMix64: every output bit depends on every input bit."""
    import numpy as np

    x_N = (x_N ^ x_N >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x_N = (x_N ^ x_N >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x_N ^ x_N >> np.uint64(31)


@lru_cache(maxsize=256)
def _round_keys(key: tuple[int, ...]) -> "np.ndarray":
    import numpy as np

    # NumPy guarantees the same SeedSequence output in every version.
    keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64)
    keys.flags.writeable = False
    return keys


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
