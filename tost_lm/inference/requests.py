"""Requests for log-likelihoods, how texts become requests, and sums of their scores; without torch."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np


class Request(NamedTuple):
    """Tokens to score, given those before them; int64 ids, at least one of each."""

    context: np.ndarray
    target: np.ndarray

    @property
    def inputs(self) -> int:
        """Tokens that the model reads."""
        return len(self.context) + len(self.target) - 1


class Likelihoods(NamedTuple):
    """Scores of R requests."""

    nats: np.ndarray
    """−log p of the whole target, float64 [R]."""
    tokens: np.ndarray
    """Tokens of the target, int64 [R]."""
    is_greedy: np.ndarray
    """Whether each token of the target is the most likely one, bool [R]."""


def disjoint_windows(ids: np.ndarray, first: int, window: int, *, fill_last: bool = False) -> Iterator[Request]:
    """Each token once, in windows of `window` targets.

    The first window's context is the id `first`, that of others the token before them. With `fill_last` the last
    window gets as much context as fits.
    """
    ids = np.concatenate([[first], ids]).astype(np.int64)
    for start in range(1, len(ids), window):
        end = min(start + window, len(ids))
        begin = max(0, end - 1 - window) if fill_last else start - 1
        yield Request(ids[begin:start], ids[start:end])


def strided_windows(ids: np.ndarray, window: int, stride: int) -> Iterator[Request]:
    """Windows that begin `stride` tokens apart; each scores the tokens that the windows before it did not.

    As in Hugging Face's guide to perplexity, a window has no context before its first token. The first token of the
    text is not scored, and with `stride` = `window` neither is that of any window.
    """
    ids, scored = ids.astype(np.int64), 0
    for start in range(0, len(ids), stride):
        end, scored = min(start + window, len(ids)), max(scored, start + 1)
        if scored < end:
            yield Request(ids[start:scored], ids[scored:end])
        if end == len(ids):
            return
        scored = end


def left_truncated(ids: np.ndarray, begin: int, window: int) -> Request:
    """The tokens from `begin` on, with as much context as the window holds, at least one token."""
    return Request(ids[min(max(0, len(ids) - 1 - window), begin - 1) : begin], ids[begin:])


def rates(nats: float, tokens: int, size: int) -> dict[str, Any]:
    """Nats per token, perplexity, and bits per byte Σ nats / (ln 2 · Σ bytes), with their denominators."""
    return {
        "tokens": tokens,
        "bytes": size,
        "nats": nats,
        "nats_per_token": nats / tokens,
        "perplexity_per_token": perplexity(nats / tokens),
        "bits_per_byte": nats / (math.log(2) * size),
    }


LARGEST_EXPONENT = 600.0


def perplexity(nats: float) -> float:
    """e^nats of mean nats, at most e^600: a larger one, as per word of a text without spaces, may not be finite."""
    return math.exp(min(nats, LARGEST_EXPONENT))


BOOTSTRAP_RESAMPLES = 1000


def bootstrap_error(bits: np.ndarray, sizes: np.ndarray) -> float | None:
    """Bootstrap standard error of Σ bits / Σ bytes over documents, with a fixed seed; None for one document."""
    if len(bits) < 2:
        return None
    draws = np.random.default_rng(0)
    ratios = np.empty(BOOTSTRAP_RESAMPLES)
    for i in range(BOOTSTRAP_RESAMPLES):
        drawn = draws.integers(0, len(bits), len(bits))
        ratios[i] = bits[drawn].sum() / sizes[drawn].sum()
    return float(ratios.std(ddof=1))
