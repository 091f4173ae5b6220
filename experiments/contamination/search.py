"""Overlap of test sets with the training text in token shards, by n-grams of words (appendix C of arXiv 2005.14165).

A word is a run of letters and digits in lower case, so case, punctuation and spaces do not matter. The n-grams of the
test sets are in memory; the shards are decoded document by document. Matches are exact: a hash only proposes them.
Worker processes import this module, so it needs no torch.

Shape suffixes: G distinct n-grams of the test sets, N words of an n-gram, W words of a document.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from tost_lm.data.shards import Shards
from tost_lm.data.workers import in_processes

WORDS = 13
"""Words of an n-gram."""
WORD = re.compile(r"[^\W_]+")
TASK_TOKENS = 1 << 21
SPLIT = "train"


class Overlap(NamedTuple):
    """An example with n-grams in the training text."""

    set: str
    example: int
    """Number in the file of the test set, from 1."""
    ngrams: int
    """Distinct n-grams of the example."""
    found: int
    """Those of them in the training text."""
    documents: int
    """Training documents with the one that most documents have."""
    document: int
    """Number of the first of these documents in the split, from 0."""
    text: str
    """Words of this n-gram."""


class SetTotals(NamedTuple):
    """Counts of a test set: its examples, those with at least one n-gram, and those that overlap."""

    examples: int
    checked: int
    overlapping: int


class SetNgrams:
    """The distinct n-grams of test sets: `ngrams_GN` of word ids, and those of each example."""

    def __init__(self, sets: Mapping[str, Iterable[str]]) -> None:
        self._ids: dict[str, int] = {}  # of words, from 1; 0 is any other word
        self.examples: list[tuple[str, int]] = []
        windows: list[np.ndarray] = []
        for name, texts in sets.items():
            for number, text in enumerate(texts, start=1):
                words = WORD.findall(text.lower())
                ids = [self._ids.setdefault(word, len(self._ids) + 1) for word in words]
                self.examples.append((name, number))
                windows.append(_windows(np.array(ids, np.uint32)))
        self.ngrams_GN, index = np.unique(np.concatenate(windows), axis=0, return_inverse=True)
        ends = np.cumsum([len(window) for window in windows])
        self.of_example = [np.unique(part) for part in np.split(index.reshape(-1), ends[:-1])]
        draws = np.random.default_rng(0)
        distinct = False
        while not distinct:
            self._factor = np.uint64(int(draws.integers(1 << 62)) * 2 + 1)
            hashes_G = self._hashes(self.ngrams_GN.T)
            self._order_G = np.argsort(hashes_G)
            self._sorted_G = hashes_G[self._order_G]
            distinct = bool((self._sorted_G[1:] != self._sorted_G[:-1]).all())

    def find(self, text: str) -> np.ndarray:
        """Indices of the distinct n-grams in a text, ascending."""
        words = WORD.findall(text.lower())
        ids_W = np.fromiter(map(self._ids.get, words, repeat(0)), np.uint32, len(words))
        windows = _windows(ids_W)
        if not len(windows) or not len(self._sorted_G):
            return np.empty(0, np.int64)
        hashes = self._hashes([ids_W[start : start + len(windows)] for start in range(WORDS)])
        at = np.searchsorted(self._sorted_G, hashes).clip(max=len(self._sorted_G) - 1)
        (likely,) = np.nonzero(self._sorted_G[at] == hashes)
        ngrams = self._order_G[at[likely]]
        return np.unique(ngrams[(windows[likely] == self.ngrams_GN[ngrams]).all(axis=1)])

    def text(self, ngram: int) -> str:
        """The words of an n-gram."""
        words = list(self._ids)
        return " ".join(words[i - 1] for i in self.ngrams_GN[ngram])

    def _hashes(self, columns: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
        """A number of each n-gram, from its N words."""
        hashes = np.zeros(len(columns[0]), np.uint64)
        for column in columns:
            hashes = hashes * self._factor + column
        return hashes


class Contamination(NamedTuple):
    """The result: totals of each test set, and overlaps by falling fraction of their n-grams."""

    totals: dict[str, SetTotals]
    overlaps: list[Overlap]


def measure_contamination(
    shards: Shards, sets: Mapping[str, Iterable[str]], workers: int, report: Callable[[int], None] = lambda _: None
) -> Contamination:
    """Search the training documents of a shard folder for the n-grams of test sets.

    Args:
        sets: the texts of the examples by name of the set.
        report: called with the number of tokens read so far.

    Raises:
        DataError: an index is damaged, or a worker process died.
    """
    ngrams = SetNgrams(sets)
    count = len(ngrams.ngrams_GN)
    documents_G, first_G = np.zeros(count, np.int64), np.full(count, np.iinfo(np.int64).max)
    died = (
        "a searching process died (killed or out of memory); run the same command again, with "
        f"contamination.workers={max(1, workers // 2)} to use less memory"
    )
    read = 0
    for task, (found, documents, first) in in_processes(
        _Searcher.search, _tasks(shards), workers, _Searcher, (shards.folder, ngrams), died
    ):
        documents_G[found] += documents
        first_G[found] = np.minimum(first_G[found], first)
        read += int(task.lengths.sum(dtype=np.int64))
        report(read)
    totals, overlaps = {name: SetTotals(0, 0, 0) for name in sets}, []
    for (name, number), own in zip(ngrams.examples, ngrams.of_example, strict=True):
        found = own[documents_G[own] > 0]
        before = totals[name]
        totals[name] = SetTotals(
            before.examples + 1, before.checked + bool(len(own)), before.overlapping + bool(len(found))
        )
        if len(found):
            most = int(found[documents_G[found].argmax()])
            place = int(documents_G[most]), int(first_G[most])
            overlaps.append(Overlap(name, number, len(own), len(found), *place, ngrams.text(most)))
    return Contamination(totals, sorted(overlaps, key=lambda one: -one.found / one.ngrams))


class _Task(NamedTuple):
    """Documents of a shard: their first token in it, their tokens, and the number of the first in the split."""

    shard: int
    start: int
    lengths: np.ndarray
    first: int


def _tasks(shards: Shards) -> Iterator[_Task]:
    first = 0
    for shard, lengths in enumerate(shards.lengths(SPLIT)):
        ends = np.cumsum(lengths, dtype=np.int64)
        at = 0
        while at < len(lengths):
            start = int(ends[at] - lengths[at])
            stop = max(at + 1, int(np.searchsorted(ends, start + TASK_TOKENS)))
            yield _Task(shard, start, lengths[at:stop], first + at)
            at = stop
        first += len(lengths)


class _Searcher:
    """In a worker process: decodes documents and looks for n-grams."""

    def __init__(self, folder: Path, ngrams: SetNgrams) -> None:
        shards = Shards.open(folder)
        self._tokens, self._tokenizer, self._ngrams = shards.token_arrays(SPLIT), shards.tokenizer(), ngrams

    def search(self, task: _Task) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The n-grams in these documents, the documents with each, and the number of the first."""
        tokens, end = self._tokens[task.shard], task.start
        found: list[np.ndarray] = [np.empty(0, np.int64)]
        numbers: list[np.ndarray] = [np.empty(0, np.int64)]
        for number, length in enumerate(task.lengths.tolist(), start=task.first):
            end += length
            ngrams = self._ngrams.find(self._tokenizer.decode(tokens[end - length : end - 1].tolist()))
            found.append(ngrams)
            numbers.append(np.full(len(ngrams), number))
        # Numbers ascend, so the first place of an n-gram is its first document.
        ngrams, places, documents = np.unique(np.concatenate(found), return_index=True, return_counts=True)
        return ngrams, documents, np.concatenate(numbers)[places]


def _windows(ids_W: np.ndarray) -> np.ndarray:
    """All n-grams, [W − N + 1, N] or [0, N]."""
    return sliding_window_view(ids_W, WORDS) if len(ids_W) >= WORDS else np.empty((0, WORDS), np.uint32)
