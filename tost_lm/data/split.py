"""Assigns documents to the train, valid and test splits."""

import math
from typing import Literal

import xxhash

from tost_lm.data.config import CorpusConfig
from tost_lm.errors import ConfigError, DataError

NANOGPT_FRACTION = 0.0005
NANOGPT_SEED = 2357


class Splitter:
    """Assigns the documents of a corpus to splits; picklable.

    With `hash` the split depends on the text alone: equal texts are in one split, added documents move no other, and a
    larger held-out fraction takes documents from train only. With `nanogpt` it depends on the row number.
    """

    def __init__(self, corpus: CorpusConfig, rows: int | None):
        """`rows`: number of rows in the corpus, bad and empty ones included; `hash` does not need it.

        Raises:
            ConfigError: too few rows for split `nanogpt`.
            DataError: split `nanogpt` without the package datasets.
        """
        self._valid_rows: frozenset[int] | None = None
        if corpus.split == "nanogpt":
            if rows is None:
                raise ValueError("split nanogpt needs the number of rows")
            self._valid_rows = _nanogpt_rows(rows)
        # integers, because a hash near 2**64 becomes 1.0 as a float
        self._valid_below = math.ceil(corpus.valid_fraction * 2**64)
        self._test_from = 2**64 - math.ceil(corpus.test_fraction * 2**64)

    def split_of(self, row: int, text: str) -> Literal["train", "valid", "test"]:
        """The split of the document in row `row` of the corpus."""
        if self._valid_rows is not None:
            return "valid" if row in self._valid_rows else "train"
        point = xxhash.xxh3_64_intdigest(text.encode())
        if point < self._valid_below:
            return "valid"
        return "test" if point >= self._test_from else "train"


def _nanogpt_rows(rows: int) -> frozenset[int]:
    """The validation rows of nanoGPT, drawn by `datasets.Dataset.train_test_split` as nanoGPT calls it."""
    if rows < 2:
        raise ConfigError(f"corpus.split nanogpt: too few rows to divide: {rows}; set corpus.split=hash")
    try:
        import datasets
    except ImportError:
        raise DataError("corpus.split nanogpt: needs the package datasets: pip install datasets") from None
    import numpy as np
    import pyarrow

    numbers = datasets.Dataset(pyarrow.table({"row": np.arange(rows)}), fingerprint=f"rows-{rows}")
    sides = numbers.train_test_split(test_size=NANOGPT_FRACTION, seed=NANOGPT_SEED, shuffle=True, keep_in_memory=True)
    return frozenset(sides["test"]["row"])
