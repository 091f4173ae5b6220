"""Several corpora in one run, each with its share of the samples.

Shape suffixes: N samples, C corpora, P places of a cycle.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from tost_lm.data.permutation import Order, permuted
from tost_lm.data.shards import Shards
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import ConfigError, DataError
from tost_lm.files import sha256_bytes

if TYPE_CHECKING:
    import numpy as np

CYCLE = 10_000
"""Samples in which every corpus has its share, to the sample."""


class Corpora:
    """The shard folders that a run is trained on, in an order that does not depend on how they are called."""

    def __init__(self, shards: Sequence[Shards], weights: Sequence[float]) -> None:
        """Raises DataError unless all were made with one tokenizer, ConfigError for one that hardly weighs anything."""
        for other in shards[1:]:
            if other.manifest["tokenizer"]["sha256"] != shards[0].manifest["tokenizer"]["sha256"]:
                raise DataError(
                    f"{shards[0].folder} and {other.folder}: tokens of different tokenizers cannot be mixed; build "
                    "the shards of both with one"
                )
        total = sum(weights)
        for one, weight in zip(shards, weights, strict=True):
            if weight * CYCLE < total:
                raise ConfigError(
                    f"data.mixture: {one.folder} weighs less than one sample in {CYCLE:,}; leave it out or raise its "
                    "weight"
                )
        pairs = [(one, weight / total) for one, weight in zip(shards, weights, strict=True)]
        pairs.sort(key=lambda pair: (pair[0].fingerprint, pair[1]))
        self.shards = [one for one, _ in pairs]
        self.weights = [weight for _, weight in pairs]
        """Of each, of all samples; they sum to 1."""

    @classmethod
    def open(cls, weights: Mapping[Path, float]) -> "Corpora":
        """Open folders after the fast check of `Shards.open`. Raises DataError or ConfigError."""
        return cls([Shards.open(folder) for folder in weights], list(weights.values()))

    @property
    def fingerprint(self) -> str:
        """Of what is trained on, a hex SHA-256: that of the shards, for a mixture of theirs and the weights."""
        if len(self.shards) == 1:
            return self.shards[0].fingerprint
        parts = [(one.fingerprint, weight) for one, weight in zip(self.shards, self.weights, strict=True)]
        return sha256_bytes(json.dumps(parts).encode())

    @property
    def vocab_size(self) -> int:
        """Of the one tokenizer."""
        return self.shards[0].vocab_size

    @property
    def eot(self) -> int:
        """The end-of-text id of the one tokenizer."""
        return self.shards[0].eot

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made all these tokens."""
        return self.shards[0].tokenizer()


class Mixture:
    """Which corpus each sample of a run is of: in every CYCLE samples each has its share, shuffled by the seed."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        """`weights` of the corpora, [C], sum to 1."""
        self._samples = _shares(weights)
        self._seed = seed
        self._cycle = lru_cache(2)(self._shuffle_cycle)

    def locate(self, sample_N: "np.ndarray") -> "tuple[np.ndarray, np.ndarray]":
        """The corpus of each sample of the run, and the sample's running number within it, both int64 [N]."""
        import numpy as np

        corpus_N, number_N = np.empty_like(sample_N), np.empty_like(sample_N)
        cycle_N, place_N = np.divmod(sample_N, CYCLE)
        for cycle in np.unique(cycle_N).tolist():
            chosen = cycle_N == cycle
            corpus_P, earlier_P = self._cycle(cycle)
            corpus_N[chosen], number_N[chosen] = corpus_P[place_N[chosen]], earlier_P[place_N[chosen]]
        return corpus_N, number_N + cycle_N * self._samples[corpus_N]

    def _shuffle_cycle(self, cycle: int) -> "tuple[np.ndarray, np.ndarray]":
        """The corpus of each of a cycle's places, and how many earlier ones are of the same, both [CYCLE]."""
        import numpy as np

        place_P, end_C = np.arange(CYCLE), np.cumsum(self._samples)
        corpus_P = np.searchsorted(end_C, permuted(place_P, CYCLE, Order.MIXTURE, cycle, self._seed), "right")
        earlier_P = np.empty_like(place_P)
        earlier_P[np.argsort(corpus_P, kind="stable")] = place_P - np.repeat(end_C - self._samples, self._samples)
        return corpus_P, earlier_P


def _shares(weights: Sequence[float]) -> "np.ndarray":
    """How many of CYCLE samples are of each corpus, int64 [C]: largest remainders."""
    import numpy as np

    quota_C = np.array(weights) * CYCLE
    samples_C = np.floor(quota_C).astype(np.int64)
    missing = CYCLE - int(samples_C.sum())
    samples_C[np.argsort(samples_C - quota_C, kind="stable")[:missing]] += 1
    return samples_C
