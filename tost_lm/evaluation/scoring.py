"""Held-out score, protocol `heldout@bpb`: every token of every document predicted exactly once.

A document is read as [EOT] + its tokens, in disjoint windows of model.max_positions. The first input of a window is the
last token of the window before it. EOT is only an input and is not scored.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tost_lm.evaluation.language_model import LanguageModel
from tost_lm.evaluation.likelihood import score_requests
from tost_lm.evaluation.ranks import Ranks
from tost_lm.evaluation.windows import disjoint_windows

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
