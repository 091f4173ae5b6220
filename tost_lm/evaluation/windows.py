"""How a text that is longer than a model reads at once is cut into requests, each of at most `window` inputs."""

from collections.abc import Iterator

import numpy as np

from tost_lm.evaluation.likelihood import Request


def disjoint_windows(ids: np.ndarray, first: int, window: int, *, fill_last: bool = False) -> Iterator[Request]:
    """Each token once, in windows of so many targets: the first stands after the id `first`, others after the token
    before them, the last, with `fill_last`, after as many as the window holds."""
    ids = np.concatenate([[first], ids]).astype(np.int64)
    for start in range(1, len(ids), window):
        end = min(start + window, len(ids))
        begin = max(0, end - 1 - window) if fill_last else start - 1
        yield Request(ids[begin:start], ids[start:end])


def strided_windows(ids: np.ndarray, window: int, stride: int) -> Iterator[Request]:
    """Windows that begin `stride` tokens apart, each scored where the one before it ended.

    As in Hugging Face's guide to perplexity nothing stands before a window: the text's first token is scored nowhere,
    nor, where `stride` is `window`, is that of any window.
    """
    ids, scored = ids.astype(np.int64), 0
    for start in range(0, len(ids), stride):
        end, scored = min(start + window, len(ids)), max(scored, start + 1)
        if scored < end:
            yield Request(ids[start:scored], ids[scored:end])
        if end == len(ids):
            return
        scored = end


def after_what_fits(ids: np.ndarray, begin: int, window: int) -> Request:
    """The tokens from `begin` on, after as many of those before them as the window holds, but one at least."""
    return Request(ids[min(max(0, len(ids) - 1 - window), begin - 1) : begin], ids[begin:])
