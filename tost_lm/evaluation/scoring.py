"""Held-out score, protocol `heldout@bpb`: every token of every document predicted exactly once.

A document is read as [EOT] + its tokens, in disjoint windows of model.max_positions. The first input of a window is the
last token of the window before it. EOT is only an input and is not scored.

Byte n-gram baselines are trained on the same training text and scored on the same held-out bytes: unigram, bigram and
trigram, interpolated by Witten-Bell smoothing (Witten and Bell 1991; in the form of Chen and Goodman 1998, section
2.4). With c the counts and T(h) the number of distinct bytes seen after the context h:
    P(b | h) = (c(h b) + T(h) · P(b | shorter h)) / (c(h) + T(h)),   below the unigram: 1/256 for every byte.
Contexts do not cross documents, so the first bytes of a document have shorter contexts.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tost_lm.evaluation.generation import LanguageModel
from tost_lm.evaluation.likelihood import disjoint_windows, score_requests
from tost_lm.evaluation.ranks import Ranks

BOOTSTRAP_RESAMPLES = 1000


@dataclass(frozen=True)
class DocumentScores:
    """Scores of documents, in their order: summed nats (float64), tokens and bytes (int64), each [documents]."""

    nats: np.ndarray
    tokens: np.ndarray
    bytes: np.ndarray

    def totals(self) -> dict[str, Any]:
        """Nats per token, perplexity and bits per byte, with their denominators and a standard error."""
        return {
            "documents": len(self.nats),
            **rates(float(self.nats.sum()), int(self.tokens.sum()), int(self.bytes.sum())),
            "bits_per_byte_standard_error": bootstrap_error(self.nats / math.log(2), self.bytes),
        }

    def against(self, name: str, baseline_bits: np.ndarray) -> dict[str, Any]:
        """Bits per byte of a baseline (`baseline_bits`: of each document), and by how much the model's are lower.

        The difference has its own standard error, since the same documents are hard for both.
        """
        advantage = baseline_bits - self.nats / math.log(2)
        return {
            "name": name,
            "bits_per_byte": float(baseline_bits.sum() / self.bytes.sum()),
            "model_lower_by": float(advantage.sum() / self.bytes.sum()),
            "model_lower_by_standard_error": bootstrap_error(advantage, self.bytes),
        }


def score_documents(
    model: LanguageModel,
    documents: Sequence[np.ndarray],
    sizes: Sequence[int],
    eot: int,
    batch_tokens: int | None = None,
    ranks: Ranks | None = None,
) -> DocumentScores:
    """Score documents (ids without EOT; `sizes`: bytes of their text) with a model in evaluation mode."""
    windows = [
        (number, window)
        for number, tokens in enumerate(documents)
        for window in disjoint_windows(tokens, eot, model.config.max_positions)
    ]
    scores = score_requests(model, [window for _, window in windows], batch_tokens, ranks)
    nats = np.zeros(len(documents))
    np.add.at(nats, [number for number, _ in windows], scores.nats)
    counts = np.array([len(tokens) for tokens in documents], dtype=np.int64)
    return DocumentScores(nats, counts, np.array(sizes, dtype=np.int64))


def rates(nats: float, tokens: int, size: int) -> dict[str, Any]:
    """Nats per token, perplexity, and bits per byte Σ nats / (ln 2 · Σ bytes), with their denominators."""
    return {
        "tokens": tokens,
        "bytes": size,
        "nats": nats,
        "nats_per_token": nats / tokens,
        "perplexity_per_token": math.exp(nats / tokens) if nats / tokens < 700 else math.inf,
        "bits_per_byte": nats / (math.log(2) * size),
    }


def bootstrap_error(bits: np.ndarray, sizes: np.ndarray) -> float:
    """Bootstrap standard error of Σ bits / Σ bytes over documents, with a fixed seed."""
    draws = np.random.default_rng(0)
    ratios = np.empty(BOOTSTRAP_RESAMPLES)
    for i in range(BOOTSTRAP_RESAMPLES):
        drawn = draws.integers(0, len(bits), len(bits))
        ratios[i] = bits[drawn].sum() / sizes[drawn].sum()
    return float(ratios.std(ddof=1))


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
