"""Samples of a corpus: T labels each; the input of a label is the token before it.

A sample is a list of segments of the concatenated split. It is a pure function of the seed and the sample's number, so
resuming needs no state and only requested samples are read.

Permutations of [0, n) need no table: any elements of an order of 10⁹ samples are computed directly.

With document packing, documents are packed whole into samples by best fit (arXiv 2404.10830), with document masking.
The labels of a document are its stored tokens with the end-of-text id; its inputs are an end-of-text id and the same
tokens shifted by one. A document of more than T tokens is cut into samples of T tokens and a rest. Documents are packed
in groups. A group is a set of blocks from all over the corpus; its size determines its number of samples, so a group is
packed only when one of its samples is requested.

Shape suffixes: N samples, n samples of one epoch or group, S segments, D documents, R documents with a rest or ranges,
K blocks, G groups.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tost_lm.data.shards import Concatenation

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
    bits = max((n - 1).bit_length(), 2)
    value_N = index_N.astype(np.uint64)
    outside_N = np.ones(len(value_N), dtype=bool)
    while outside_N.any():
        value_N[outside_N] = _shuffle_bits(value_N[outside_N], bits, _round_keys(key))
        outside_N = value_N >= n
    return value_N.astype(np.int64)


def _shuffle_bits(value_N: "np.ndarray", bits: int, round_keys: "np.ndarray") -> "np.ndarray":
    low_bits = np.uint64(bits // 2)
    low_mask, high_mask = np.uint64((1 << bits // 2) - 1), np.uint64((1 << bits - bits // 2) - 1)
    low_N, high_N = value_N & low_mask, value_N >> low_bits
    for low_key, high_key in round_keys.reshape(-1, 2):
        low_N ^= _mixed(high_N + low_key) & low_mask
        high_N ^= _mixed(low_N + high_key) & high_mask
    return high_N << low_bits | low_N


def _mixed(x_N: "np.ndarray") -> "np.ndarray":
    """The finalizer of SplitMix64: every output bit depends on every input bit."""
    x_N = (x_N ^ x_N >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x_N = (x_N ^ x_N >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x_N ^ x_N >> np.uint64(31)


@lru_cache(maxsize=256)
def _round_keys(key: tuple[int, ...]) -> "np.ndarray":
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


class TokenRanges:
    """Ranges of the tokens of a split; those that touch each other are one."""

    def __init__(self, start_R: "np.ndarray", end_R: "np.ndarray") -> None:
        order = np.argsort(start_R, kind="stable")
        start_R, end_R = start_R[order], np.maximum.accumulate(end_R[order])
        first_R = np.ones(len(start_R), dtype=bool)
        first_R[1:] = start_R[1:] > end_R[:-1]
        self.start, self.end = start_R[first_R], end_R[np.append(first_R[1:], True)[: len(first_R)]]
        self._before = np.append(0, np.cumsum(self.end - self.start))

    def __or__(self, other: "TokenRanges") -> "TokenRanges":
        return TokenRanges(np.append(self.start, other.start), np.append(self.end, other.end))

    def within(self, start_N: "np.ndarray", end_N: "np.ndarray") -> "np.ndarray":
        """How many tokens of each range [start, end) are in these, int64 [N]."""
        return self._up_to(end_N) - self._up_to(start_N)

    def _up_to(self, token_N: "np.ndarray") -> "np.ndarray":
        range_N = np.searchsorted(self.start, token_N, "right") - 1
        inside_N = np.minimum(token_N, self.end[range_N]) - self.start[range_N] if len(self.start) else 0
        return np.where(range_N < 0, 0, self._before[range_N] + inside_N)


class Earlier(NamedTuple):
    """The part of a source that a run read before the source got other samples."""

    orders: int
    """Number of its orders so far."""
    read: TokenRanges
    """What was read in its last pass."""


class ConcatenatedSamples:
    """The published samples: sample w has the tokens [w·T, (w + 1)·T) as labels, across document boundaries.

    Every token is a label once per epoch, and each epoch has an order of its own. The last sample is padded. With
    `earlier`, the samples with the most unread tokens come first in the first epoch, which takes 8 bytes a sample.
    """

    def __init__(
        self, lengths: "Sequence[np.ndarray]", seq_len: int, corpus: int, seed: int, earlier: Earlier | None = None
    ) -> None:
        """`lengths`: tokens of each document of each shard, including end-of-text ids, [D]."""
        self._tokens = sum(int(length_D.sum(dtype=np.int64)) for length_D in lengths)
        self._seq_len = seq_len
        self._corpus, self._seed, self._earlier = corpus, seed, earlier
        self._first_epoch = None
        if earlier:
            window_N = self._shuffled(np.arange(len(self)), 0)
            end_N = np.minimum((window_N + 1) * seq_len, self._tokens)
            read_N = earlier.read.within(window_N * seq_len, end_N)
            self._first_epoch = window_N[np.argsort(read_N, kind="stable")]

    def __len__(self) -> int:
        """Samples per epoch."""
        return -(-self._tokens // self._seq_len)

    def segments(self, sample_N: "np.ndarray") -> Segments:
        """The segments of the samples with these numbers, which count from 0 over all epochs."""
        epoch_N, position_N = np.divmod(sample_N, len(self))
        window_N = np.empty_like(position_N)
        for epoch, chosen in runs(epoch_N):
            window_N[chosen] = self._windows(position_N[chosen], epoch)
        start_N = window_N * self._seq_len
        length_N = np.minimum(self._tokens - start_N, self._seq_len)
        start_S = np.stack([start_N, np.full_like(start_N, -1)], 1).ravel()
        length_S = np.stack([length_N, self._seq_len - length_N], 1).ravel()
        kept = length_S > 0
        return Segments(start_S[kept], length_S[kept], start_S[kept] <= 0)

    def read(self, samples: int) -> TokenRanges:
        """What is read of the pass that is under way after so many samples."""
        epoch, done = divmod(samples, len(self))
        start_N = self._windows(np.arange(done), epoch) * self._seq_len
        ranges = TokenRanges(start_N, np.minimum(start_N + self._seq_len, self._tokens))
        return ranges | self._earlier.read if self._earlier and epoch == 0 else ranges

    def _windows(self, position_N: "np.ndarray", epoch: int) -> "np.ndarray":
        if epoch == 0 and self._first_epoch is not None:
            return self._first_epoch[position_N]
        return self._shuffled(position_N, epoch)

    def _shuffled(self, position_N: "np.ndarray", epoch: int) -> "np.ndarray":
        key = (Order.WINDOWS, self._corpus, epoch, self._seed, *_orders(self._earlier))
        return permuted(position_N, len(self), *key)


def _orders(earlier: Earlier | None) -> tuple[int, ...]:
    """The last part of a key."""
    return (earlier.orders,) if earlier else ()


def runs(x_N: "np.ndarray") -> Iterator[tuple[int, slice]]:
    """Each run of equal neighbours: the value and its slice."""
    edges = [0, *(np.flatnonzero(np.diff(x_N)) + 1).tolist(), len(x_N)]
    for start, end in pairwise(edges):
        yield int(x_N[start]), slice(start, end)


BLOCK_TOKENS = 2**14
GROUP_TOKENS = 2**22
GROUP_SAMPLES = 2**10
LONG_GROUP_TOKENS = 2**26  # about 10⁵ documents, packed within a second
LONG_GROUP_SAMPLES = 2**4
GROUPS_KEPT = 4


class PackedSamples:
    """Samples of packed documents. Few documents are cut; every stored token is a label once per epoch.

    With `earlier`, groups have blocks with about the same share of unread tokens. In the first epoch groups with more
    of them come first, and within a group samples with more of them.
    """

    def __init__(
        self, lengths: "Sequence[np.ndarray]", seq_len: int, corpus: int, seed: int, earlier: Earlier | None = None
    ) -> None:
        """As of `ConcatenatedSamples`."""
        self._lengths = Concatenation(lengths)
        self._seq_len, self._corpus, self._seed, self._earlier = seq_len, corpus, seed, earlier
        self._blocks = Blocks.of(lengths)
        tokens = int(self._blocks.first_token[-1])
        count = len(self._blocks.first_token) - 1
        self._block_order = permuted(np.arange(count), count, Order.BLOCKS, corpus, seed, *_orders(earlier))
        if earlier:
            start_K, end_K = (self._blocks.first_token[self._block_order + side] for side in (0, 1))
            share_K = earlier.read.within(start_K, end_K) / (end_K - start_K)
            self._block_order = self._block_order[np.argsort(share_K, kind="stable")]
        size_K = np.diff(self._blocks.first_token)[self._block_order]
        before_K = np.cumsum(size_K) - size_K
        groups = max(1, tokens // group_tokens(seq_len))
        number_G = np.arange(groups)
        # ⌈number · tokens / groups⌉ without the product, which overflows int64 from about 10¹² tokens
        border_G = number_G * (tokens // groups) - -number_G * (tokens % groups) // groups
        self._first_block = np.unique(np.append(np.searchsorted(before_K, border_G), count))
        first_block_G = self._first_block[:-1]
        self._samples = -(-np.diff(np.append(before_K[first_block_G], tokens)) // seq_len)
        self._packing_of_group = lru_cache(GROUPS_KEPT)(self._pack_group)
        self._samples_of_group = lru_cache(GROUPS_KEPT)(self._shuffle_group)
        self._groups_of_epoch = lru_cache(2)(self._order_groups)

    def __len__(self) -> int:
        return int(self._samples.sum())

    def segments(self, sample_N: "np.ndarray") -> Segments:
        """The same as of `ConcatenatedSamples`. Each epoch has an order of groups, and of the samples in each group."""
        found = []
        epoch_N, position_N = np.divmod(sample_N, len(self))
        for epoch, in_epoch in runs(epoch_N):
            group_G, first_position_G = self._groups_of_epoch(epoch)
            position_n = position_N[in_epoch]
            for turn, in_group in runs(np.searchsorted(first_position_G, position_n, "right") - 1):
                group = int(group_G[turn])
                number_n = self._samples_of_group(group, epoch)[position_n[in_group] - first_position_G[turn]]
                found.append(self._packing_of_group(group).segments_of(number_n))
        return Segments(*map(np.concatenate, zip(*found, strict=True)))

    def read(self, samples: int) -> TokenRanges:
        """What is read of the pass that is under way after so many samples."""
        epoch, done = divmod(samples, len(self))
        group_G, first_position_G = self._groups_of_epoch(epoch)
        turn = int(np.searchsorted(first_position_G, done, "right")) - 1  # the group that is not read to its end
        whole = [self._block_order[self._first_block[g] : self._first_block[g + 1]] for g in group_G[:turn].tolist()]
        block_K = np.concatenate([np.empty(0, np.int64), *whole])
        of_epoch = np.arange(epoch * len(self) + first_position_G[turn], samples)
        rest = self.segments(of_epoch) if len(of_epoch) else Segments(*[np.empty(0, np.int64)] * 3)
        real = rest.start >= 0
        start_R = np.append(self._blocks.first_token[block_K], rest.start[real])
        ranges = TokenRanges(
            start_R, np.append(self._blocks.first_token[block_K + 1], (rest.start + rest.length)[real])
        )
        return ranges | self._earlier.read if self._earlier and epoch == 0 else ranges

    def _shuffle_group(self, group: int, epoch: int) -> "np.ndarray":
        """The samples of a group in the order of an epoch, [n]."""
        count = int(self._samples[group])
        key = (Order.SAMPLES_OF_GROUP, self._corpus, epoch, group, self._seed, *_orders(self._earlier))
        number_n = permuted(np.arange(count), count, *key)
        if self._earlier is None or epoch:
            return number_n
        segments, first_segment = self._packing_of_group(group)
        read_S = self._earlier.read.within(segments.start, segments.start + segments.length * (segments.start >= 0))
        before_S = np.append(0, np.cumsum(read_S))
        read_n = before_S[first_segment[number_n + 1]] - before_S[first_segment[number_n]]
        return number_n[np.argsort(read_n, kind="stable")]

    def _order_groups(self, epoch: int) -> "tuple[np.ndarray, np.ndarray]":
        """The groups in the order of an epoch, and the first sample of each in that order, both [G]."""
        count = len(self._samples)
        group_G = np.arange(count)
        if self._earlier is None or epoch:
            key = (Order.GROUPS, self._corpus, epoch, self._seed, *_orders(self._earlier))
            group_G = permuted(group_G, count, *key)
        samples_G = self._samples[group_G]
        return group_G, np.cumsum(samples_G) - samples_G

    def _pack_group(self, group: int) -> "Packing":
        block_K = self._block_order[self._first_block[group] : self._first_block[group + 1]]
        first_K = self._blocks.first_document[block_K]
        documents_K = self._blocks.first_document[block_K + 1] - first_K
        tokens_K = self._blocks.first_token[block_K + 1] - self._blocks.first_token[block_K]
        length_D = self._lengths.read(first_K, documents_K, np.int64)
        skipped_K = self._blocks.first_token[block_K] - (np.cumsum(tokens_K) - tokens_K)
        start_D = np.cumsum(length_D) - length_D + np.repeat(skipped_K, documents_K)
        return pack(start_D, length_D, self._seq_len)


SAMPLES = {"concatenated": ConcatenatedSamples, "best-fit": PackedSamples}
"""The samples of each kind of packing."""


def group_tokens(seq_len: int) -> int:
    """Target number of tokens of a group, which consists of whole blocks.

    A group is padded to n whole samples, so at most 1/n of it is padding. n is at least 1024; above T = 2¹⁶ it is
    2²⁶ / T, so that packing is fast, but at least 16.
    """
    samples = min(GROUP_SAMPLES, max(LONG_GROUP_TOKENS // seq_len, LONG_GROUP_SAMPLES))
    return max(GROUP_TOKENS, samples * seq_len)


class Blocks(NamedTuple):
    """The documents that begin in each BLOCK_TOKENS tokens of a split, without blocks where none begins."""

    first_document: "np.ndarray"
    """int64 [K + 1]; the last element is the number of documents."""
    first_token: "np.ndarray"
    """int64 [K + 1]; the last element is the number of tokens."""

    @classmethod
    def of(cls, lengths: "Iterable[np.ndarray]") -> "Blocks":
        """The blocks of documents with these lengths, [D] for each shard."""
        documents, tokens, last_block = 0, 0, -1
        first_documents, first_tokens = [], []
        for length_D in lengths:
            end_D = np.cumsum(length_D, dtype=np.int64) + tokens
            start_D = end_D - length_D
            block_D = start_D // BLOCK_TOKENS
            first = np.flatnonzero(np.diff(block_D, prepend=last_block))
            first_documents.append(first + documents)
            first_tokens.append(start_D[first])
            documents, tokens, last_block = documents + len(length_D), int(end_D[-1]), int(block_D[-1])
        return cls(np.concatenate([*first_documents, [documents]]), np.concatenate([*first_tokens, [tokens]]))


class Packing(NamedTuple):
    """The segments of the samples of a group."""

    segments: Segments
    first_segment: "np.ndarray"
    """Index of the first segment of each sample, int64 [N + 1]."""

    def segments_of(self, number_N: "np.ndarray") -> Segments:
        """The segments of these samples, in order."""
        first_N = self.first_segment[number_N]
        count_N = self.first_segment[number_N + 1] - first_N
        before_N = np.cumsum(count_N) - count_N
        index_S = np.repeat(first_N - before_N, count_N) + np.arange(count_N.sum())
        return Segments(*(x[index_S] for x in self.segments))


def pack(start_D: "np.ndarray", length_D: "np.ndarray", seq_len: int) -> Packing:
    """Pack documents into ⌈tokens / T⌉ samples by best-fit decreasing; the last sample is padded.

    Documents that fit in no gap are cut to fill the largest gaps. Only a segment at the first token of a document is
    fresh; the first input of any other segment is the token before it.
    """
    whole_D, rest_D = np.divmod(length_D, seq_len)
    full = int(whole_D.sum())
    samples = -(-int(length_D.sum()) // seq_len)
    padding = samples * seq_len - int(length_D.sum())

    number_S = np.arange(full) - np.repeat(np.cumsum(whole_D) - whole_D, whole_D)  # of a document's full samples
    full_start_S = np.repeat(start_D, whole_D) + number_S * seq_len
    document_R = np.argsort(-rest_D, kind="stable")[: np.count_nonzero(rest_D)]
    item_S, offset_S, rest_S, bin_S = _best_fit(rest_D[document_R].tolist(), samples - full, seq_len, padding)
    document_S = document_R[item_S]
    skipped_S = whole_D[document_S] * seq_len + offset_S

    start_S = np.concatenate([full_start_S, start_D[document_S] + skipped_S, [-1]])
    length_S = np.concatenate([np.full(full, seq_len), rest_S, [padding]])
    fresh_S = np.concatenate([number_S == 0, skipped_S == 0, [True]])
    sample_S = np.concatenate([np.arange(full), full + bin_S, [samples - 1]])
    order = np.argsort(sample_S, kind="stable")[: None if padding else -1]
    first_segment = np.searchsorted(sample_S[order], np.arange(samples + 1))
    return Packing(Segments(start_S[order], length_S[order], fresh_S[order]), first_segment)


def _best_fit(sizes: list[int], bins: int, room: int, padding: int) -> "np.ndarray":
    """Place items, largest first, into bins of `room`; the last bin keeps `padding` free. All bins become full.

    Returns the item of each segment, its offset in the item, its length and its bin, int64 [4, S].
    """
    gaps = _Gaps(bins, room, padding)
    placed: list[tuple[int, int, int, int]] = []
    too_large = []
    for item, size in enumerate(sizes):
        if size <= gaps.largest:
            placed.append((item, 0, size, gaps.fill(size)))
        else:
            too_large.append(item)
    for item in too_large:
        offset = 0
        while offset < sizes[item]:
            size = min(sizes[item] - offset, gaps.largest)
            placed.append((item, offset, size, gaps.fill(size)))
            offset += size
    return np.array(placed, dtype=np.int64).reshape(-1, 4).T


class _Gaps:
    """The free room in bins."""

    def __init__(self, bins: int, room: int, padding: int) -> None:
        self._sizes: list[int] = []  # ascending, each once
        self._bins: dict[int, list[int]] = {}
        for number in range(bins):
            self._add(room - padding if number == bins - 1 else room, number)

    @property
    def largest(self) -> int:
        """The largest gap, 0 if there is none."""
        return self._sizes[-1] if self._sizes else 0

    def fill(self, size: int) -> int:
        """Use `size` of the smallest sufficient gap; returns the number of its bin."""
        at = bisect_left(self._sizes, size)
        gap = self._sizes[at]
        number = self._bins[gap].pop()
        if not self._bins[gap]:
            del self._bins[gap], self._sizes[at]
        if gap > size:
            self._add(gap - size, number)
        return number

    def _add(self, gap: int, number: int) -> None:
        if gap not in self._bins:
            insort(self._sizes, gap)
            self._bins[gap] = []
        self._bins[gap].append(number)
