"""Statistics of a shard folder: document lengths and token counts."""

from typing import TYPE_CHECKING, NamedTuple

from tost_lm.data.shards import Shards

if TYPE_CHECKING:
    import numpy as np

COUNTED_TOKENS = 1 << 24  # at once, to bound memory


class Bucket(NamedTuple):
    """Number of documents of `shortest` to `longest` tokens, including the end-of-text id."""

    shortest: int
    longest: int
    documents: int


def length_histogram(lengths: "np.ndarray") -> list[Bucket]:
    """Buckets by powers of 2, from the shortest document to the longest. `lengths` [documents] ≥ 1."""
    import numpy as np

    exponents = np.frexp(lengths)[1] - 1  # 2^e ≤ length < 2^(e + 1), exactly
    counts = np.bincount(exponents)
    return [Bucket(1 << e, (2 << e) - 1, int(counts[e])) for e in range(int(exponents.min()), len(counts))]


def token_counts(shards: Shards, split: str) -> "np.ndarray":
    """Occurrences of each token id, int64 [vocab_size]."""
    import numpy as np

    counts = np.zeros(shards.vocab_size, np.int64)
    for tokens in shards.token_arrays(split):
        for start in range(0, len(tokens), COUNTED_TOKENS):
            counts += np.bincount(tokens[start : start + COUNTED_TOKENS], minlength=shards.vocab_size)
    return counts
