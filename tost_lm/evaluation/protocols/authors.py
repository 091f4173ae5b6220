"""What the ToST authors measured (arXiv 2412.17810, released code), to compare with their table and nothing else."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import DataError
from tost_lm.evaluation.likelihood import Request
from tost_lm.evaluation.protocols.interface import Example
from tost_lm.evaluation.protocols.perplexity import TextProtocol

WINDOWS, SEED = 1000, 1337


def joined(rows_of: Callable[[Path], Sequence[str]]) -> Callable[[Path, Tokenizer], np.ndarray]:
    """A reader of files that `rows_of` gives the rows of: their ids, each with an end of text, int64."""

    def read(path: Path, tokenizer: Tokenizer) -> np.ndarray:
        return np.array([id for row in rows_of(path) for id in [*tokenizer.encode(row), tokenizer.eot]], np.int64)

    return read


class RandomWindows(TextProtocol):
    """`…@tost`: mean nats of all tokens in 1,000 windows drawn with replacement from all rows, an end of text after
    each of them, blank ones included. Ends of text count as tokens, so words and bytes say nothing and are left out."""

    headline, by_token = "nats_per_token", True

    def __init__(self, data_set: str, read: Callable[[Path, Tokenizer], np.ndarray]):
        """`read` gives the ids of a file."""
        self.name, self.data_set, self.read = f"{data_set}@tost", data_set, read

    def examples(self, path: Path, tokenizer: Tokenizer, window: int) -> Sequence[Example]:
        ids = self.read(path, tokenizer)
        if len(ids) <= window:
            raise DataError(f"{path}: {len(ids):,} tokens are too few for windows of {window:,}; give all of it")
        starts = np.random.default_rng(SEED).integers(0, len(ids) - window, WINDOWS)
        return [
            Example((Request(ids[start : start + 1], ids[start + 1 : start + 1 + window]),), {"start": start})
            for start in starts.tolist()
        ]
