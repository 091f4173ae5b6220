"""Held-out score, protocol `heldout@bpb`: every token of every document predicted exactly once.

A document is read as [EOT] + its tokens, in disjoint windows of model.max_positions; a window's first input is
the last token of the window before it. EOT is in neither sum: it is an input only. The log-softmax is in float32
at least, sums in float64, and batching changes the result by no more than rounding.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tost_lm.ops.cross_entropy import IGNORED_LABEL
from tost_lm.parallel.whole import LanguageModel

BOOTSTRAP_RESAMPLES = 1000


@dataclass(frozen=True)
class DocumentScores:
    """Per document, in the order given: summed nats (float64), tokens and bytes (int64), each [documents]."""

    nats: np.ndarray
    tokens: np.ndarray
    bytes: np.ndarray

    def totals(self) -> dict[str, Any]:
        """Nats a token, perplexity a token and bits a byte, with their denominators and a standard error."""
        return {
            "documents": len(self.nats),
            **rates(float(self.nats.sum()), int(self.tokens.sum()), int(self.bytes.sum())),
            "bits_per_byte_standard_error": bootstrap_error(self.nats / math.log(2), self.bytes),
        }

    def against(self, name: str, baseline_bits: np.ndarray) -> dict[str, Any]:
        """A baseline's bits a byte (`baseline_bits`: of each document) and how much lower the model's are.

        The difference has a standard error of its own: documents are hard or easy for both at once.
        """
        advantage = baseline_bits - self.nats / math.log(2)
        return {
            "name": name,
            "bits_per_byte": float(baseline_bits.sum() / self.bytes.sum()),
            "model_lower_by": float(advantage.sum() / self.bytes.sum()),
            "model_lower_by_standard_error": bootstrap_error(advantage, self.bytes),
        }


@torch.inference_mode()
def score_documents(
    model: LanguageModel, documents: Sequence[np.ndarray], sizes: Sequence[int], eot: int, batch_sequences: int
) -> DocumentScores:
    """Score documents (token ids without EOT; `sizes`: bytes of their text) with a model in evaluation mode."""
    windows = [
        (number, *window)
        for number, tokens in enumerate(documents)
        for window in _windows(tokens, eot, model.config.max_positions)
    ]
    windows.sort(key=lambda window: len(window[1]))
    nats = np.zeros(len(documents))
    for start in range(0, len(windows), batch_sequences):
        batch = windows[start : start + batch_sequences]
        inputs_BT = _padded([inputs for _, inputs, _ in batch], eot)
        labels_BT = _padded([labels for _, _, labels in batch], IGNORED_LABEL)
        nats_B = _window_nats(model, inputs_BT, labels_BT)
        np.add.at(nats, [number for number, _, _ in batch], nats_B.cpu().numpy())
    counts = np.array([len(tokens) for tokens in documents], dtype=np.int64)
    return DocumentScores(nats, counts, np.array(sizes, dtype=np.int64))


def rates(nats: float, tokens: int, size: int) -> dict[str, Any]:
    """Nats a token, perplexity a token and bits a byte, Σ nats / (ln 2 · Σ bytes), with their denominators."""
    return {
        "tokens": tokens,
        "bytes": size,
        "nats": nats,
        "nats_per_token": nats / tokens,
        "perplexity_per_token": math.exp(nats / tokens) if nats / tokens < 700 else math.inf,
        "bits_per_byte": nats / (math.log(2) * size),
    }


def bootstrap_error(bits: np.ndarray, sizes: np.ndarray) -> float:
    """Standard error of Σ bits / Σ bytes over documents drawn again with replacement (seeded, so it repeats)."""
    draws = np.random.default_rng(0)
    ratios = np.empty(BOOTSTRAP_RESAMPLES)
    for i in range(BOOTSTRAP_RESAMPLES):
        drawn = draws.integers(0, len(bits), len(bits))
        ratios[i] = bits[drawn].sum() / sizes[drawn].sum()
    return float(ratios.std(ddof=1))


def _windows(tokens: np.ndarray, eot: int, positions: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(inputs, labels) of each window; the labels of all windows are the document, each token once."""
    inputs = np.concatenate([np.array([eot], dtype=np.int64), tokens[:-1]])
    return [(inputs[i : i + positions], tokens[i : i + positions]) for i in range(0, len(tokens), positions)]


def _padded(rows: list[np.ndarray], filler: int) -> Tensor:
    """Rows of different length as one int64 tensor, filled on the right, where a causal model cannot look."""
    filled = np.full((len(rows), max(len(row) for row in rows)), filler, dtype=np.int64)
    for place, row in zip(filled, rows, strict=True):
        place[: len(row)] = row
    return torch.from_numpy(filled)


def _window_nats(model: LanguageModel, inputs_BT: Tensor, labels_BT: Tensor) -> Tensor:
    """Summed nats of each row [B], float64."""
    device = next(model.parameters()).device
    nats_BT = model(inputs_BT.to(device), labels_BT.to(device)).nats
    return nats_BT.double().sum(dim=1)
