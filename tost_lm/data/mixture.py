"""Several corpora in one run, each with a fixed fraction of the samples.

Shape suffixes: N samples, C corpora, P positions in a cycle.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from tost_lm.data.sampler import Order, permuted
from tost_lm.data.shards import Shards
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import ConfigError, DataError
from tost_lm.files import sha256_bytes

if TYPE_CHECKING:
    import numpy as np

CYCLE = 10_000
"""Number of samples in which each corpus has its exact fraction, rounded to whole samples."""


class Corpora:
    """The shard folders of a run, in an order that does not depend on their paths."""

    def __init__(self, shards: Sequence[Shards], weights: Sequence[float]) -> None:
        """Raises DataError for different tokenizers, ConfigError for a weight below one sample in CYCLE."""
        for other in shards[1:]:
            if other.manifest["tokenizer"]["sha256"] != shards[0].manifest["tokenizer"]["sha256"]:
                raise DataError(
                    f"{shards[0].folder} and {other.folder}: tokens of different tokenizers cannot be mixed; build "
                    "both with the same tokenizer"
                )
        total = sum(weights)
        for one, weight in zip(shards, weights, strict=True):
            if weight * CYCLE < total:
                raise ConfigError(
                    f"data.mixture: {one.folder} has less than one sample in {CYCLE:,}; remove it or raise its weight"
                )
        pairs = [(one, weight / total) for one, weight in zip(shards, weights, strict=True)]
        pairs.sort(key=lambda pair: (pair[0].fingerprint, pair[1]))
        self.shards = [one for one, _ in pairs]
        self.weights = [weight for _, weight in pairs]
        """Fraction of the samples of each corpus; they sum to 1."""

    @classmethod
    def open(cls, weights: Mapping[Path, float]) -> "Corpora":
        """Open folders after the fast check of `Shards.open`. Raises DataError or ConfigError."""
        return cls([Shards.open(folder) for folder in weights], list(weights.values()))

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 of the training data: of the one shard folder, or of all folders and their weights."""
        if len(self.shards) == 1:
            return self.shards[0].fingerprint
        weighted = [(one.fingerprint, weight) for one, weight in zip(self.shards, self.weights, strict=True)]
        return sha256_bytes(json.dumps(weighted).encode())

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the tokenizer."""
        return self.shards[0].vocab_size

    @property
    def eot(self) -> int:
        """The end-of-text id of the tokenizer."""
        return self.shards[0].eot

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of all corpora."""
        return self.shards[0].tokenizer()


class Mixture:
    """Assigns each sample of a run to a corpus: exact fractions in every CYCLE samples, shuffled by the seed."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        """`weights` [C] of the corpora sum to 1."""
        self._samples = _samples_per_cycle(weights)
        self._seed = seed
        self._cycle = lru_cache(2)(self._shuffle_cycle)

    def samples_of_one_pass(self, lengths_C: "np.ndarray") -> int:
        """Samples of the run after which every corpus, of this many samples, has been read once at least."""
        if len(lengths_C) == 1:
            return int(lengths_C[0])
        read = self._samples > 0
        return int((-(-lengths_C[read] // self._samples[read])).max()) * CYCLE

    def locate(self, sample_N: "np.ndarray") -> "tuple[np.ndarray, np.ndarray]":
        """The corpus of each sample of the run, and the number of the sample within that corpus, both int64 [N]."""
        import numpy as np

        corpus_N, number_N = np.empty_like(sample_N), np.empty_like(sample_N)
        cycle_N, position_N = np.divmod(sample_N, CYCLE)
        for cycle in np.unique(cycle_N).tolist():
            chosen = cycle_N == cycle
            corpus_P, earlier_P = self._cycle(cycle)
            corpus_N[chosen], number_N[chosen] = corpus_P[position_N[chosen]], earlier_P[position_N[chosen]]
        return corpus_N, number_N + cycle_N * self._samples[corpus_N]

    def _shuffle_cycle(self, cycle: int) -> "tuple[np.ndarray, np.ndarray]":
        """The corpus at each position of a cycle, and the number of earlier samples of that corpus, both [CYCLE]."""
        import numpy as np

        position_P, end_C = np.arange(CYCLE), np.cumsum(self._samples)
        corpus_P = np.searchsorted(end_C, permuted(position_P, CYCLE, Order.MIXTURE, cycle, self._seed), "right")
        earlier_P = np.empty_like(position_P)
        earlier_P[np.argsort(corpus_P, kind="stable")] = position_P - np.repeat(end_C - self._samples, self._samples)
        return corpus_P, earlier_P


def _samples_per_cycle(weights: Sequence[float]) -> "np.ndarray":
    """Samples of each corpus in a cycle, int64 [C], by the largest remainder method."""
    import numpy as np

    quota_C = np.array(weights) * CYCLE
    samples_C = np.floor(quota_C).astype(np.int64)
    missing = CYCLE - int(samples_C.sum())
    samples_C[np.argsort(samples_C - quota_C, kind="stable")[:missing]] += 1
    return samples_C
