"""The batches of a run, from one corpus or from several with a fixed fraction of the samples each.

What a rank reads for a training step is a pure function of the seed, the stages of the run so far and the step. A
source goes on where it was as long as its samples have the same length and packing. Otherwise it gets a new order, in
which what was not yet read comes first.

Shape suffixes: A micro-batches, B rows of a micro-batch, L tokens of a row on one rank, N samples, S segments,
C corpora, P positions in a cycle.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain, count, pairwise, takewhile
from operator import mul
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from tost_lm.data.samples import SAMPLES, ConcatenatedSamples, Earlier, Order, PackedSamples, Segments, permuted
from tost_lm.data.shards import Concatenation, Shards
from tost_lm.data.stages import Packing, StageRecord, StageSource, phases
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import ConfigError, DataError
from tost_lm.files import sha256_bytes

CYCLE = 10_000
"""Number of samples in which each corpus has its exact fraction, rounded to whole samples."""


def context_sizes(seq_len: int) -> list[int]:
    """Sizes for which `context_shares` is shown: 1024 · 4ⁿ tokens below half of a sample, and half of a sample."""
    half = seq_len // 2
    return [*takewhile(lambda size: size < half, (1024 * 4**n for n in count())), half]


def context_shares(
    lengths: "Sequence[np.ndarray]", seq_len: int, packing: Packing, sizes: Sequence[int]
) -> list[float]:
    """Fraction of the labels that see at least `size` tokens of their own document, for each size from 1 to T.

    `lengths`: tokens of each document of each shard, including end-of-text ids. Exact, except that a document that
    best-fit packing cuts because it fits in no gap counts as whole.
    """
    length_D = np.concatenate([np.empty(0, np.int64), *lengths])
    end_D = np.cumsum(length_D) if packing == "concatenated" else length_D  # best-fit: a document starts a sample
    shares = []
    for size in sizes:

        def seeing(x_D: np.ndarray, size: int = size) -> np.ndarray:
            """How many of the first x labels have at least `size` tokens before them in their sample."""
            return x_D // seq_len * (seq_len - size + 1) + np.maximum(x_D % seq_len - size + 1, 0)

        longer = length_D > size
        first_D = (end_D - length_D + size)[longer]  # the first label that `size` tokens of its document precede
        shares.append(float((seeing(end_D[longer]) - seeing(first_D)).sum() / max(length_D.sum(), 1)))
    return shares


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
        pairs.sort(key=lambda pair: pair[0].fingerprint)
        for (one, _), (other, _) in pairwise(pairs):
            if one.fingerprint == other.fingerprint:
                raise ConfigError(
                    f"data.mixture: {one.folder} and {other.folder} have the same documents; remove one, and give the "
                    "other the weight of both"
                )
        self.shards = [one for one, _ in pairs]
        self.weights = [weight for _, weight in pairs]
        """Fraction of the samples of each corpus; they sum to 1."""
        self.vocab_size, self.eot = shards[0].vocab_size, shards[0].eot
        """Of the tokenizer."""

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
    def sources(self) -> tuple[StageSource, ...]:
        """The record of each folder."""
        return tuple(
            StageSource(str(one.folder), one.fingerprint, weight, sum(map(len, one.token_arrays("train"))))
            for one, weight in zip(self.shards, self.weights, strict=True)
        )

    def context_shares(self, seq_len: int, packing: Packing, sizes: Sequence[int]) -> list[float]:
        """`context_shares` of the training labels. Raises DataError for a damaged .idx file."""
        shares = [context_shares(one.lengths("train"), seq_len, packing, sizes) for one in self.shards]
        return [sum(map(mul, self.weights, of_size)) for of_size in zip(*shares, strict=True)]

    def require_tokens(self, seq_len: int, documents: Literal["train", "valid"]) -> None:
        """Raises ConfigError if a corpus is shorter than a sample."""
        for one in self.shards:
            if (tokens := sum(map(len, one.token_arrays(documents)))) < seq_len:
                raise ConfigError(
                    f"train.seq_len {seq_len}: the {documents} split of {one.folder} has only {tokens} tokens; "
                    "lower it or add documents"
                )

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

    def samples_before(self, sample: int) -> "np.ndarray":
        """How many of the samples before `sample` are of each corpus, int64 [C]."""
        cycles, rest = divmod(sample, CYCLE)
        return cycles * self._samples + np.bincount(self._cycle(cycles)[0][:rest], minlength=len(self._samples))

    def samples_of_one_pass(self, lengths_C: "np.ndarray") -> int:
        """Samples of the run after which every corpus, of this many samples, has been read once at least."""
        if len(lengths_C) == 1:
            return int(lengths_C[0])
        read = self._samples > 0
        return int((-(-lengths_C[read] // self._samples[read])).max()) * CYCLE

    def locate(self, sample_N: "np.ndarray") -> "tuple[np.ndarray, np.ndarray]":
        """The corpus of each sample of the run, and the number of the sample within that corpus, both int64 [N]."""
        corpus_N, number_N = np.empty_like(sample_N), np.empty_like(sample_N)
        cycle_N, position_N = np.divmod(sample_N, CYCLE)
        for cycle in np.unique(cycle_N).tolist():
            chosen = cycle_N == cycle
            corpus_P, earlier_P = self._cycle(cycle)
            corpus_N[chosen], number_N[chosen] = corpus_P[position_N[chosen]], earlier_P[position_N[chosen]]
        return corpus_N, number_N + cycle_N * self._samples[corpus_N]

    def _shuffle_cycle(self, cycle: int) -> "tuple[np.ndarray, np.ndarray]":
        """The corpus at each position of a cycle, and the number of earlier samples of that corpus, both [CYCLE]."""
        position_P, end_C = np.arange(CYCLE), np.cumsum(self._samples)
        corpus_P = np.searchsorted(end_C, permuted(position_P, CYCLE, Order.MIXTURE, cycle, self._seed), "right")
        earlier_P = np.empty_like(position_P)
        earlier_P[np.argsort(corpus_P, kind="stable")] = position_P - np.repeat(end_C - self._samples, self._samples)
        return corpus_P, earlier_P


def _samples_per_cycle(weights: Sequence[float]) -> "np.ndarray":
    """Samples of each corpus in a cycle, int64 [C], by the largest remainder method."""
    quota_C = np.array(weights) * CYCLE
    samples_C = np.floor(quota_C).astype(np.int64)
    missing = CYCLE - int(samples_C.sum())
    samples_C[np.argsort(samples_C - quota_C, kind="stable")[:missing]] += 1
    return samples_C


class BatchShard(NamedTuple):
    """The shard of one rank in the global batch."""

    data_rank: int
    data_ranks: int
    """Number of data ranks; each reads the same number of contiguous samples."""
    columns: tuple[tuple[int, int], ...]
    """The ranges [start, end) of every row that the rank reads."""


class Batch(NamedTuple):
    """The tokens that one rank reads in one step."""

    tokens: "np.ndarray"
    """int32 [A, B, L]."""
    labels: "np.ndarray"
    """The next token, or the ignored label; int32 [A, B, L]."""
    document_ends: "np.ndarray"
    """Best-fit packing: ends of documents in the concatenated full rows of all micro-batches, int64; else empty."""


class TrainingBatches:
    """A map-style dataset without torch: item `step` is what this rank reads after `step` steps of the run.

    Samples are numbered over the stages of a run that have the same samples: step n of a single stage has those from
    n · global_batch_size on. A micro-batch of concatenated samples has one row for each sample. A micro-batch of packed
    samples is a single row.

    The held-out split (`documents="valid"`) has one batch: the first `global_batch_size` samples, each only once, and
    padding up to a multiple of ranks × micro-batch size.
    """

    samples: int | None = None
    """Number of samples in the batch of the held-out split."""

    def __init__(
        self,
        corpora: Corpora,
        shard: BatchShard,
        *,
        packing: Packing,
        seed: int,
        global_batch_size: int,
        micro_batch_size: int,
        seq_len: int,
        ignored_label: int,
        documents: Literal["train", "valid"] = "train",
        stages: Sequence[StageRecord] = (),
    ) -> None:
        """
        Args:
            stages: of the run so far, the last with these sizes; empty: one from step 0 on, or the held-out split.

        Raises:
            ConfigError: a corpus is shorter than a sample.
            DataError: a corpus is damaged.
        """
        corpora.require_tokens(seq_len, documents)
        shards_of = [one.token_arrays(documents) for one in corpora.shards]
        tokens_of = [sum(map(len, arrays)) for arrays in shards_of]
        padding = np.full(seq_len, corpora.eot)
        self._tokens = Concatenation([*chain(*shards_of), padding])
        masks_of = [one.loss_masks(documents) for one in corpora.shards]
        self._loss_mask = Concatenation([*chain(*masks_of), np.zeros(seq_len, np.uint8)])
        self._first_tokens = [0, *accumulate(tokens_of)]  # of each corpus, and of the padding after the last
        self.folders = [one.folder for one in corpora.shards]
        """The folder of each corpus."""
        self._mixture = Mixture(corpora.weights, seed)
        self._first_step = stages[-1].first_step if stages else 0
        read = phases(stages, self._first_step)
        self._first_sample = read[-1][1] if read else 0
        numbers = {source.fingerprint: 0 for stage in stages for source in stage.sources}  # in this order
        numbers |= {one.fingerprint: 0 for one in corpora.shards}
        placed = []
        for one in corpora.shards:
            lengths, number = one.lengths(documents), [*numbers].index(one.fingerprint)
            if read:
                placed.append(_place(one.fingerprint, read, lengths, number, seed))
            else:
                placed.append((SAMPLES[packing](lengths, seq_len, number, seed), 0))
        self._samples = [samples for samples, _ in placed]
        self._first_numbers = np.array([number for _, number in placed])
        self._shard, self._packed = shard, packing == "best-fit"
        self._global_batch_size, self._micro_batch_size = global_batch_size, micro_batch_size
        self._seq_len = seq_len
        self._end_of_text, self._ignored_label = corpora.eot, ignored_label
        self._held_out_N = np.empty(0, np.int64)
        if documents == "valid":
            lengths_C = np.array([len(samples) for samples in self._samples])
            sample_N = np.arange(min(global_batch_size, self._mixture.samples_of_one_pass(lengths_C)))
            corpus_N, number_N = self._mixture.locate(sample_N)
            self._held_out_N = sample_N[number_N < lengths_C[corpus_N]]
            self.samples = len(self._held_out_N)
            unit = shard.data_ranks * micro_batch_size
            self._global_batch_size = -(-self.samples // unit) * unit

    def __getitem__(self, step: int) -> Batch:
        """Raises IndexError for steps before the first of the stage, DataError as `TokenShard`."""
        if step < self._first_step:
            raise IndexError(f"step {step}")
        sample_N = self._sample_numbers(step)
        segments = self._segments(sample_N)
        ends = np.cumsum(segments.length) if self._packed else np.empty(0, dtype=np.int64)

        rows = 1 if self._packed else self._micro_batch_size
        row_tokens = self._micro_batch_size * self._seq_len // rows
        shape = (len(sample_N) // self._micro_batch_size, rows, -1)
        ranges = [self._read(_within_columns(segments, row_tokens, *columns)) for columns in self._shard.columns]
        tokens, labels = (np.concatenate([x.reshape(shape) for x in xs], -1) for xs in zip(*ranges, strict=True))
        return Batch(tokens, labels, ends)

    def corpora_of(self, step: int) -> "np.ndarray":
        """The corpus of each sample that this rank reads, as an index of `folders`, int64 [N]; −1: padding."""
        return self._locate(self._sample_numbers(step))[0]

    def _sample_numbers(self, step: int) -> "np.ndarray":
        """The samples of the run that this rank reads, int64 [N]; −1: padding."""
        samples = self._global_batch_size // self._shard.data_ranks
        of_step = self._first_sample + (step - self._first_step) * self._global_batch_size
        first = of_step + self._shard.data_rank * samples
        sample_N = np.arange(first, first + samples)
        if self.samples is None:
            return sample_N
        return np.append(self._held_out_N, np.full(samples, -1))[np.minimum(sample_N, self.samples)]

    def _locate(self, sample_N: "np.ndarray") -> "tuple[np.ndarray, np.ndarray]":
        """The result of `Mixture.locate`, with corpus −1 for padding."""
        corpus_N, number_N = self._mixture.locate(np.maximum(sample_N, 0))
        number_N += self._first_numbers[corpus_N]
        corpus_N[sample_N < 0] = -1
        return corpus_N, number_N

    def _segments(self, sample_N: "np.ndarray") -> Segments:
        """The segments of these samples of the run, in order, as ranges of `_tokens`; a sample −1 is padding."""
        corpus_N, number_N = self._locate(sample_N)
        found, numbers = [], []
        for corpus in np.unique(corpus_N).tolist():
            chosen = np.flatnonzero(corpus_N == corpus)
            if corpus < 0:
                shape = len(chosen)
                segments = Segments(np.full(shape, -1), np.full(shape, self._seq_len), np.ones(shape, bool))
            else:
                segments = self._samples[corpus].segments(number_N[chosen])
            start_S = np.where(segments.start < 0, self._first_tokens[-1], segments.start + self._first_tokens[corpus])
            found.append(segments._replace(start=start_S))
            numbers.append(chosen[(np.cumsum(segments.length) - segments.length) // self._seq_len])
        order = np.argsort(np.concatenate(numbers), kind="stable")
        return Segments(*(np.concatenate(x)[order] for x in zip(*found, strict=True)))

    def _read(self, segments: Segments) -> "tuple[np.ndarray, np.ndarray]":
        """Tokens and labels, both flat int32; reads nothing else from the shards. Padding does not count."""
        labels = self._tokens.read(segments.start, segments.length, np.int32)
        first_S = np.cumsum(segments.length) - segments.length
        tokens = np.empty_like(labels)
        tokens[1:] = labels[:-1]
        tokens[first_S] = self._end_of_text
        before = segments.start[~segments.fresh] - 1
        tokens[first_S[~segments.fresh]] = self._tokens.read(before, np.ones_like(before), np.int32)
        labels[~self._loss_mask.read(segments.start, segments.length, np.bool_)] = self._ignored_label
        return tokens, labels


def _place(
    fingerprint: str,
    read: Sequence[tuple[StageRecord, int]],
    lengths: "Sequence[np.ndarray]",
    source: int,
    seed: int,
) -> tuple[ConcatenatedSamples | PackedSamples, int]:
    """The samples of a source in the last phase, and the number of its first sample there.

    Args:
        read: `phases` of the run.
        lengths: of its documents, of each shard.
        source: its number in the run, in the order of the first use.
    """
    samples, kind, number, orders = None, None, 0, 0
    for phase, samples_there in read:
        names = [source.fingerprint for source in phase.sources]
        if fingerprint not in names:
            continue
        if kind != (phase.seq_len, phase.packing):
            earlier = Earlier(orders, samples.read(number)) if samples else None
            kind, number, orders = (phase.seq_len, phase.packing), 0, orders + 1
            samples = SAMPLES[phase.packing](lengths, phase.seq_len, source, seed, earlier)
        if phase is not read[-1][0]:
            mixture = Mixture([source.weight for source in phase.sources], seed)
            number += int(mixture.samples_before(samples_there)[names.index(fingerprint)])
    assert samples is not None
    return samples, number


def _within_columns(segments: Segments, row_tokens: int, first: int, end: int) -> Segments:
    """The segments cut to the columns [first, end) of the rows that they fill."""
    column_S = (np.cumsum(segments.length) - segments.length) % row_tokens
    before_S = np.maximum(first - column_S, 0)
    length_S = np.minimum(segments.length, end - column_S) - before_S
    kept = length_S > 0
    return Segments((segments.start + before_S)[kept], length_S[kept], (segments.fresh & (before_S == 0))[kept])
