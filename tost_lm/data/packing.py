"""Document-masked samples: whole documents packed into samples by best fit (arXiv 2404.10830), hardly one cut.

A document's labels are its stored tokens, its end-of-text id included, and its inputs the same shifted by one behind an
end-of-text id. One longer than T tokens is cut into samples of T and a rest. Documents are packed group by group: a
group is some blocks of the corpus from all over it, and how many samples it makes follows from its size alone, so that
nothing is packed before a sample of it is wanted. Shape suffixes: N samples, n those of one epoch or group among them,
S spans, D documents, R those with a rest, P pieces of them, K blocks, G groups.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from tost_lm.data.concatenation import Concatenation
from tost_lm.data.permutation import Order, permuted
from tost_lm.data.sampler import Spans, runs

if TYPE_CHECKING:
    import numpy as np

BLOCK_TOKENS = 2**14
GROUP_TOKENS = 2**22
GROUP_SAMPLES = 2**10
LONG_GROUP_TOKENS = 2**26  # some 10⁵ documents: packed within a second
LONG_GROUP_SAMPLES = 2**4
GROUPS_KEPT = 4


class PackedSamples:
    """Every document in one piece if it can be, and every stored token a label once in an epoch."""

    def __init__(self, lengths: "Sequence[np.ndarray]", sequence_tokens: int, corpus: int, seed: int) -> None:
        """`lengths`: tokens of each document of each shard, end-of-text ids counted, [D]."""
        import numpy as np

        self._lengths = Concatenation(lengths)
        self._sequence_tokens, self._corpus, self._seed = sequence_tokens, corpus, seed
        self._blocks = Blocks.of(lengths)
        tokens = int(self._blocks.first_token[-1])
        count = len(self._blocks.first_token) - 1
        self._block_order = permuted(np.arange(count), count, Order.BLOCKS, corpus, seed)
        size_K = np.diff(self._blocks.first_token)[self._block_order]
        before_K = np.cumsum(size_K) - size_K
        groups = max(1, tokens // group_tokens(sequence_tokens))
        number_G = np.arange(groups)
        # ⌈number · tokens / groups⌉, whose product overflows int64 from some 10¹² tokens on
        border_G = number_G * (tokens // groups) - -number_G * (tokens % groups) // groups
        self._first_block = np.unique(np.append(np.searchsorted(before_K, border_G), count))
        first_block_G = self._first_block[:-1]
        self._samples = -(-np.diff(np.append(before_K[first_block_G], tokens)) // sequence_tokens)
        self._packing_of_group = lru_cache(GROUPS_KEPT)(self._pack_group)
        self._groups_of_epoch = lru_cache(2)(self._order_groups)

    def __len__(self) -> int:
        return int(self._samples.sum())

    def spans(self, sample_N: "np.ndarray") -> Spans:
        """As `Samples.spans`. An epoch visits group after group, and the samples within each, in orders of its own."""
        import numpy as np

        parts = []
        epoch_N, place_N = np.divmod(sample_N, len(self))
        for epoch, in_epoch in runs(epoch_N):
            group_G, first_place_G = self._groups_of_epoch(epoch)
            place_n = place_N[in_epoch]
            for turn, in_group in runs(np.searchsorted(first_place_G, place_n, "right") - 1):
                group = int(group_G[turn])
                key = (Order.SAMPLES_OF_GROUP, self._corpus, epoch, group, self._seed)
                number_n = permuted(place_n[in_group] - first_place_G[turn], int(self._samples[group]), *key)
                parts.append(self._packing_of_group(group).spans_of(number_n))
        return Spans(*map(np.concatenate, zip(*parts, strict=True)))

    def _order_groups(self, epoch: int) -> "tuple[np.ndarray, np.ndarray]":
        """The groups as an epoch visits them, and at which of its places each begins, both [G]."""
        import numpy as np

        count = len(self._samples)
        group_G = permuted(np.arange(count), count, Order.GROUPS, self._corpus, epoch, self._seed)
        samples_G = self._samples[group_G]
        return group_G, np.cumsum(samples_G) - samples_G

    def _pack_group(self, group: int) -> "Packing":
        import numpy as np

        block_K = self._block_order[self._first_block[group] : self._first_block[group + 1]]
        first_K = self._blocks.first_document[block_K]
        documents_K = self._blocks.first_document[block_K + 1] - first_K
        tokens_K = self._blocks.first_token[block_K + 1] - self._blocks.first_token[block_K]
        length_D = self._lengths.read(first_K, documents_K, np.int64)
        skipped_K = self._blocks.first_token[block_K] - (np.cumsum(tokens_K) - tokens_K)
        start_D = np.cumsum(length_D) - length_D + np.repeat(skipped_K, documents_K)
        return pack(start_D, length_D, self._sequence_tokens)


def group_tokens(sequence_tokens: int) -> int:
    """Tokens of a group, to some blocks and if there are as many; up to twice that where they make no second one.

    A group is filled up to whole samples: of n samples' tokens at most an n-th is filling. n is 1024 or more, above
    T = 2¹⁶ fewer, 2²⁶ / T, so that a group is packed soon, and never less than 16.
    """
    samples = min(GROUP_SAMPLES, max(LONG_GROUP_TOKENS // sequence_tokens, LONG_GROUP_SAMPLES))
    return max(GROUP_TOKENS, samples * sequence_tokens)


class Blocks(NamedTuple):
    """The documents that begin within each BLOCK_TOKENS tokens of a split, but for stretches in which none begins."""

    first_document: "np.ndarray"
    """int64 [K + 1], the number of documents last."""
    first_token: "np.ndarray"
    """int64 [K + 1], the number of tokens last."""

    @classmethod
    def of(cls, lengths: "Iterable[np.ndarray]") -> "Blocks":
        """The blocks of documents whose lengths come shard by shard, [D]."""
        import numpy as np

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
    """What fills the samples of a group."""

    spans: Spans
    first_span: "np.ndarray"
    """Of each sample, int64 [N + 1]."""

    def spans_of(self, number_N: "np.ndarray") -> Spans:
        """The spans of some samples, one sample after another."""
        import numpy as np

        first_N = self.first_span[number_N]
        count_N = self.first_span[number_N + 1] - first_N
        before_N = np.cumsum(count_N) - count_N
        index_S = np.repeat(first_N - before_N, count_N) + np.arange(count_N.sum())
        return Spans(*(x[index_S] for x in self.spans))


def pack(start_D: "np.ndarray", length_D: "np.ndarray", sequence_tokens: int) -> Packing:
    """Documents in ⌈their tokens / T⌉ samples, by best-fit decreasing; what is missing from the last one is filling.

    What no sample has room for is cut to fill the largest gaps. Only documents that begin at their first token are
    fresh: other pieces have the token before them as their first input.
    """
    import numpy as np

    whole_D, rest_D = np.divmod(length_D, sequence_tokens)
    full = int(whole_D.sum())
    samples = -(-int(length_D.sum()) // sequence_tokens)
    filling = samples * sequence_tokens - int(length_D.sum())

    number_P = np.arange(full) - np.repeat(np.cumsum(whole_D) - whole_D, whole_D)  # of a document's pieces of T
    full_start_P = np.repeat(start_D, whole_D) + number_P * sequence_tokens
    document_R = np.argsort(-rest_D, kind="stable")[: np.count_nonzero(rest_D)]
    rest = _best_fit(rest_D[document_R].tolist(), samples - full, sequence_tokens, filling)
    document_P = document_R[rest.item]
    skipped_P = whole_D[document_P] * sequence_tokens + rest.offset

    start_P = np.concatenate([full_start_P, start_D[document_P] + skipped_P, [-1]])
    length_P = np.concatenate([np.full(full, sequence_tokens), rest.length, [filling]])
    fresh_P = np.concatenate([number_P == 0, skipped_P == 0, [True]])
    sample_P = np.concatenate([np.arange(full), full + rest.bin, [samples - 1]])
    order = np.argsort(sample_P, kind="stable")[: None if filling else -1]
    first_span = np.searchsorted(sample_P[order], np.arange(samples + 1))
    return Packing(Spans(start_P[order], length_P[order], fresh_P[order]), first_span)


class _Placed(NamedTuple):
    """Where the parts of items went, each [P]."""

    item: "np.ndarray"
    offset: "np.ndarray"
    length: "np.ndarray"
    bin: "np.ndarray"


def _best_fit(sizes: list[int], bins: int, room: int, filling: int) -> _Placed:
    """Items, the largest first, in bins of `room`, of which the last keeps `filling` free; together they fill them."""
    import numpy as np

    gaps = _Gaps(bins, room, filling)
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
    return _Placed(*np.array(placed, dtype=np.int64).reshape(-1, 4).T)


class _Gaps:
    """The room that is left in bins."""

    def __init__(self, bins: int, room: int, filling: int) -> None:
        self._sizes: list[int] = []  # ascending, each once
        self._bins: dict[int, list[int]] = {}
        for number in range(bins):
            self._add(room - filling if number == bins - 1 else room, number)

    @property
    def largest(self) -> int:
        """The largest gap, 0 if all are filled."""
        return self._sizes[-1] if self._sizes else 0

    def fill(self, size: int) -> int:
        """Take `size` of the smallest gap that has it; the number of its bin."""
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
