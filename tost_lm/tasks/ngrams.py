"""Byte n-gram baselines, trained on the same training text and scored on the same held-out bytes: unigram, bigram and
trigram, interpolated by Witten-Bell smoothing (Witten and Bell 1991; in the form of Chen and Goodman 1998, section
2.4). With c the counts and T(h) the number of distinct bytes seen after the context h:
    P(b | h) = (c(h b) + T(h) · P(b | shorter h)) / (c(h) + T(h)),   below the unigram: 1/256 for every byte.
Contexts do not cross documents, so the first bytes of a document have shorter contexts.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

ORDERS = (1, 2, 3)
BASELINES = ("byte unigram", "byte bigram", "byte trigram")
TILE_BYTES = 1 << 22  # bounds the memory beside the tables to a few dozen times this


class ByteNgrams:
    """Counts of byte n-grams, `tables[n]` [256**n], and counts and distinct bytes after each context.

    The trigram table takes 128 MB, and twice that while counting.
    """

    def __init__(self, documents: Iterable[bytes]):
        self.bytes = 0
        """Number of bytes counted."""
        self.tables = {order: np.zeros(256**order, dtype=np.int64) for order in ORDERS}
        for text, place in _tiles(documents):
            self.bytes += int((place >= 0).sum())
            for order in ORDERS:
                self.tables[order] += np.bincount(_keys(text, order)[place >= order - 1], minlength=256**order)
        followers = {order: self.tables[order].reshape(-1, 256) for order in ORDERS}
        self.context_counts = {order: table.sum(axis=1) for order, table in followers.items()}
        self.context_kinds = {order: np.count_nonzero(table, axis=1) for order, table in followers.items()}

    def probabilities(self, document: bytes) -> np.ndarray:
        """P of each byte of a document given those before it, by order: float64 [3, bytes]."""
        text = np.frombuffer(document, dtype=np.uint8).astype(np.int64)
        lower = np.full(len(text), 1 / 256)
        rows = []
        for order in ORDERS:
            row = lower.copy()
            keys = _keys(text, order)[order - 1 :]
            contexts = keys >> 8
            kinds = self.context_kinds[order][contexts]
            seen = self.context_counts[order][contexts] + kinds
            shorter = lower[order - 1 :]
            interpolated = (self.tables[order][keys] + kinds * shorter) / np.maximum(seen, 1)
            row[order - 1 :] = np.where(seen > 0, interpolated, shorter)
            rows.append(row)
            lower = row
        return np.stack(rows)

    def bits(self, documents: Sequence[bytes]) -> np.ndarray:
        """Summed bits of each document under each order, in the order of BASELINES: float64 [3, documents]."""
        rows = [-np.log2(self.probabilities(document)).sum(axis=1) for document in documents]
        return np.stack(rows, axis=1)


def first_bytes(documents: Iterable[bytes], size: int) -> Iterator[bytes]:
    """The first `size` bytes of the documents."""
    for document in documents:
        yield document[:size]
        size -= len(document)
        if size <= 0:
            return


def _keys(text: np.ndarray, order: int) -> np.ndarray:
    """The n-gram that ends at each byte, as one number; the first order − 1 are invalid."""
    keys = text.copy()
    for back in range(1, order):
        keys[back:] += text[:-back] << (8 * back)
    return keys


def _tiles(documents: Iterable[bytes]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Text in tiles of bounded size: bytes as int64, and the index of each in its document (−1: already counted).

    The next tile continues a longer document and repeats its last two bytes as context.
    """
    held: list[np.ndarray] = []
    places: list[np.ndarray] = []
    size = 0
    for document in documents:
        text = np.frombuffer(document, dtype=np.uint8)
        for start in range(0, len(text), TILE_BYTES):
            context = min(start, 2)
            held.append(text[start - context : start + TILE_BYTES])
            place = np.arange(start - context, min(start + TILE_BYTES, len(text)))
            place[:context] = -1
            places.append(place)
            size += len(place)
            if size >= TILE_BYTES:
                yield np.concatenate(held).astype(np.int64), np.concatenate(places)
                held, places, size = [], [], 0
    if held:
        yield np.concatenate(held).astype(np.int64), np.concatenate(places)
