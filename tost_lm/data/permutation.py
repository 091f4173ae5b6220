"""Permutations of [0, n) without a table: any elements of an order of 10⁹ samples are computed directly.

Shape suffix: N indices.
"""

from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING

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
