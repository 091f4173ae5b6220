"""Training of a form on text, and what it makes of its context."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.forms.lm import FormLM
from tost_lm.data.shards import Shards
from tost_lm.optim import OptimConfig, learning_rate
from tost_lm.optim.optimizers import build_adamw

WINDOWS = 320
"""Held-out windows."""
TARGETS, NEAR = 32, 64
"""The last tokens of a window, read after all earlier tokens and after the NEAR before them; NEAR is also the distance
of a repeated bigram."""
PASSAGE = 128
PASSAGES = 128
FAR, STREAMS = 16, 12
"""Reading as many times as far as trained."""
BINS = (8, 32, 64, 128, 256, 512)


def split_tokens(shards: Path, split: str) -> np.ndarray:
    """All tokens of a split, documents one after another."""
    return np.concatenate([part[:] for part in Shards.open(shards).token_arrays(split)])


def train(model: FormLM, tokens: np.ndarray, optim: OptimConfig, steps: int, batch: int, T: int, seed: int) -> Any:
    """Train on `steps · batch` windows that do not overlap, in an order that depends on the seed alone.

    Returns:
        Seconds, and the mean losses of tenths of the training.
    """
    order = np.random.default_rng((seed, 1)).permutation((len(tokens) - 1) // T)[: steps * batch].reshape(steps, batch)
    optimizer = build_adamw(model, optim)
    losses, began = [], time.perf_counter()
    for step, windows in enumerate(order):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, optim)
        rows = torch.from_numpy(np.stack([tokens[n * T : n * T + T + 1] for n in windows]).astype(np.int64))
        loss = model(rows[:, :-1], rows[:, 1:]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # a tensor would keep its page of freed logits
    seconds = time.perf_counter() - began
    return {
        "tokens_per_second": steps * batch * T / seconds,
        "training_losses": [float(part.mean()) for part in np.array_split(losses, 10)],
    }


@torch.inference_mode()
def measures(model: FormLM, tokens: np.ndarray, T: int) -> dict[str, Any]:
    """All measures on held-out tokens, the same for all models; losses in nats per token."""
    starts = np.linspace(0, len(tokens) - T - 1, WINDOWS).astype(int)
    rows = _rows(tokens, starts, T + 1)
    nats = _nats(model, rows)
    near = _nats(model, rows[:, -TARGETS - NEAR - 1 :])
    gains = (near[:, -TARGETS:] - nats[:, -TARGETS:]).mean(1)
    repeated = repeated_bigrams(rows)
    others = _rows(tokens, np.random.default_rng(2).integers(len(tokens) - 2 * PASSAGE, size=PASSAGES), 2 * PASSAGE)
    passages, gaps = others.split(PASSAGE, 1)
    copied = _nats(model, torch.cat([passages, gaps.roll(1, 0), passages], 1))
    copy = copied[:, -PASSAGE + 8 :].mean() - copied[:, 7 : PASSAGE - 1].mean()
    far = None
    if model.positions is None:
        long = _rows(tokens, np.linspace(0, len(tokens) - FAR * T - 1, STREAMS).astype(int), FAR * T + 1)
        late = _nats(model, long, batch=1)[:, FAR * T // 2 :]
        windows = long[:, FAR * T // 2 :].unfold(1, T + 1, T).flatten(0, 1)
        far = float(late.mean() - _nats(model, windows).mean())
    return {
        "loss": float(nats.mean()),
        "loss_by_position": {str(end): float(part.mean()) for end, part in _bins(nats)},
        "context_gain": float(gains.mean()),
        "context_gain_error": float(gains.std() / len(gains) ** 0.5),
        "repeated_bigrams": float(nats[repeated].mean()),
        "other_tokens": float(nats[~repeated].mean()),
        "copy": float(copy),
        "far": far,
    }


def repeated_bigrams(rows: Tensor) -> Tensor:
    """Of the targets rows[:, 1:]: whether the token and the one before it occurred NEAR or more tokens earlier in this
    order, and not since."""
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
