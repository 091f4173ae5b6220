"""Requests of at most `window` inputs for a text that is longer than the model reads at once."""

from collections.abc import Iterator

import numpy as np

from tost_lm.evaluation.likelihood import Request


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
