"""The losses of the released code of arXiv 2412.17810, by its own rules, for comparison with the paper's table only.

The released code computes in bfloat16 with autocast; here the model computes in its own data type.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import DataError
from tost_lm.inference.requests import Request
from tost_lm.tasks.data_sets import DataSet
from tost_lm.tasks.missing_word import LAMBADA_STANDARD, passages
from tost_lm.tasks.perplexity import (
    OWT,
    PTB,
    WIKITEXT2,
    WIKITEXT103,
    RunningText,
    openwebtext_ids,
    ptb_lines,
    wikitext_rows,
)
from tost_lm.tasks.scored import Example, section_of_test_sets
from tost_lm.tasks.task import Family

BATCHES, BATCH_SIZE, SEED = 1000, 16, 1337


def joined(rows_of: Callable[[Path], Sequence[str]]) -> Callable[[Path, Tokenizer], np.ndarray]:
    """A function that reads the ids of a file, int64: those of each row of `rows_of`, each with an end of text."""

    def read(path: Path, tokenizer: Tokenizer) -> np.ndarray:
        return np.array([id for row in rows_of(path) for id in [*tokenizer.encode(row), tokenizer.eot]], np.int64)

    return read


class RandomWindows(RunningText):
    """`owt@tost`, `wikitext2@tost`, `wikitext103@tost`, `lambada_standard@tost`, `ptb@tost`: mean nats of all tokens in
    1,000 batches of 16 windows, drawn uniformly with replacement from all rows.

    An end of text follows each row, also blank ones, and counts as a token; so there are no words and bytes. The
    released code draws with torch after it has drawn the weights. Its windows cannot be repeated, and ours have a seed
    of their own: results agree within the standard error. Not comparable with perplexities of other tasks;
    `lambada_standard@tost` is the loss of whole passages, not of last words.
    """

    about = "nats per token of random windows, as the authors' released code"
    rules, headline, by_token = "tost", "nats_per_token", True

    def __init__(self, data_set: DataSet, read: Callable[[Path, Tokenizer], np.ndarray]):
        """`read` returns the ids of a file."""
        super().__init__(data_set)
        self.read = read

    def examples(self, path: Path, tokenizer: Tokenizer, window: int) -> Sequence[Example]:
        ids = self.read(path, tokenizer)
        if len(ids) <= window:
            raise DataError(f"{path}: {len(ids):,} tokens are too few for windows of {window:,}; give the whole file")
        starts = np.random.default_rng(SEED).integers(0, len(ids) - window, BATCHES * BATCH_SIZE)
        return [
            Example((Request(ids[start : start + 1], ids[start + 1 : start + 1 + window]),), {"start": start})
            for start in starts.tolist()
        ]


FAMILY = Family(
    "tost_release",
    [
        RandomWindows(OWT, openwebtext_ids),
        RandomWindows(WIKITEXT2, joined(wikitext_rows)),
        RandomWindows(WIKITEXT103, joined(wikitext_rows)),
        RandomWindows(LAMBADA_STANDARD, joined(passages)),
        RandomWindows(PTB, joined(ptb_lines)),
    ],
    section=section_of_test_sets,
)
