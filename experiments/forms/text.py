"""The loss of a form on text, and measures of its context."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from experiments.forms.lm import FormLM
from tost_lm.data.shards import Shards

WINDOWS = 320
"""Held-out windows of screenings, and as many of finals."""
TARGETS, NEAR = 32, 64
"""The last tokens of a window, read after all earlier tokens and after the NEAR before them; NEAR is also the distance
of a repeated bigram."""
PASSAGE = 128
PASSAGES = 128
FAR, STREAMS = 16, 12
"""Times the trained length, and the number of texts read that far."""
BINS = (8, 32, 64, 128, 256, 512)


def split_tokens(shards: Path, split: str) -> np.ndarray:
    """All tokens of a split, documents one after another."""
    return np.concatenate([part[:] for part in Shards.open(shards).token_arrays(split)])


def loss_of_windows(
    model: FormLM, tokens: np.ndarray, steps: int, batch: int, T: int, seed: int
) -> Callable[[int], Tensor]:
    """The loss at each step, on windows that do not overlap, in an order that depends on the seed alone. When all have
    been read, they are read again in another order."""
    draws, windows = np.random.default_rng((seed, 1)), (len(tokens) - 1) // T
    passes = [draws.permutation(windows) for _ in range(-(-steps * batch // windows))]
    order = np.concatenate(passes)[: steps * batch].reshape(steps, batch)

    def loss_of(step: int) -> Tensor:
        rows = _rows(tokens, order[step] * T, T + 1)
        loss = model(rows[:, :-1], rows[:, 1:]).loss
        assert loss is not None
        return loss

    return loss_of


@torch.inference_mode()
def measures(model: FormLM, tokens: np.ndarray, T: int, *, is_screening: bool) -> dict[str, Any]:
    """All measures on held-out tokens, the same for all models; losses in nats per token.

    Screenings and finals have disjoint windows.
    """
    starts = np.linspace(0, len(tokens) - T - 1, 2 * WINDOWS).astype(int)
    rows = _rows(tokens, starts[int(is_screening) :: 2], T + 1)
    nats = _nats(model, rows)
    near = _nats(model, rows[:, -TARGETS - NEAR - 1 :])
    gains = (near[:, -TARGETS:] - nats[:, -TARGETS:]).mean(1)
    repeated = repeated_bigrams(rows)
    others = _rows(tokens, np.random.default_rng(2).integers(len(tokens) - 2 * PASSAGE, size=PASSAGES), 2 * PASSAGE)
    passages, gaps = others.split(PASSAGE, 1)
    copied = _nats(model, torch.cat([passages, gaps.roll(1, 0), passages], 1))
    copy = copied[:, -PASSAGE + 8 :].mean() - copied[:, 7 : PASSAGE - 1].mean()
    long = _rows(tokens, np.linspace(0, len(tokens) - FAR * T - 1, STREAMS).astype(int), FAR * T + 1)
    late = _nats(model, long, batch=1)[:, FAR * T // 2 :]
    windows = long[:, FAR * T // 2 :].unfold(1, T + 1, T).flatten(0, 1)
    return {
        "loss": float(nats.mean()),
        "loss_by_position": {str(end): float(part.mean()) for end, part in _bins(nats)},
        "context_gain": float(gains.mean()),
        "context_gain_error": float(gains.std() / len(gains) ** 0.5),
        "repeated_bigrams": float(nats[repeated].mean()),
        "other_tokens": float(nats[~repeated].mean()),
        "copy": float(copy),
        "far": float(late.mean() - _nats(model, windows).mean()),
    }


def repeated_bigrams(rows: Tensor) -> Tensor:
    """Whether each target rows[:, 1:] and the token before it occurred NEAR or more tokens earlier in this order, and
    not since."""
    pairs = rows[:, :-1] * (int(rows.max()) + 1) + rows[:, 1:]
    found = []
    for pair in pairs:
        same = (pair[:, None] == pair).tril(-1)
        found.append(same.any(1) & ~same.triu(1 - NEAR).any(1))
    return torch.stack(found)


def _rows(tokens: np.ndarray, starts: np.ndarray, length: int) -> Tensor:
    return torch.from_numpy(np.stack([tokens[start : start + length] for start in starts]).astype(np.int64))


def _nats(model: FormLM, rows: Tensor, batch: int = 8) -> Tensor:
    """Nats of the tokens rows[:, 1:]."""
    parts = []
    for part in rows.split(batch):
        parts.append(cross_entropy(model(part[:, :-1]).logits.mT, part[:, 1:], reduction="none"))
    return torch.cat(parts)


def _bins(nats: Tensor) -> list[tuple[int, Tensor]]:
    starts = (0, *BINS[:-1])
    return [(end, nats[:, start:end]) for start, end in zip(starts, BINS, strict=True) if start < nats.shape[1]]
