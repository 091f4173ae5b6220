"""On which side of the split a document lies."""

import math
from typing import Literal

import xxhash

from tost_lm.data.config import CorpusConfig
from tost_lm.errors import ConfigError, DataError

NANOGPT_SHARE = 0.0005
NANOGPT_SEED = 2357


class Splitter:
    """Sides of a corpus's documents; picklable.

    Split `hash` goes by the text alone: equal texts lie on one side, a corpus that grows moves none, and a share that
    grows takes from the training side only. Split `nanogpt` goes by the row.
    """

    def __init__(self, corpus: CorpusConfig, rows: int | None):
        """`rows`: how many the corpus has, bad and empty ones among them; split `hash` needs no number.

        Raises:
            ConfigError: too few rows for split `nanogpt`.
            DataError: split `nanogpt` without the package datasets.
        """
        self._valid_rows: frozenset[int] | None = None
        if corpus.split == "nanogpt":
            if rows is None:
                raise ValueError("split nanogpt is drawn over a known number of rows")
            self._valid_rows = _nanogpt_rows(rows)
        # whole numbers, since a hash near 2**64 is 1.0 as a share
        self._valid_below = math.ceil(corpus.valid_share * 2**64)
        self._test_from = 2**64 - math.ceil(corpus.test_share * 2**64)

    def split_of(self, row: int, text: str) -> Literal["train", "valid", "test"]:
        """The side of the document in row `row` of the corpus."""
        if self._valid_rows is not None:
            return "valid" if row in self._valid_rows else "train"
        point = xxhash.xxh3_64_intdigest(text.encode())
        if point < self._valid_below:
            return "valid"
        return "test" if point >= self._test_from else "train"


def _nanogpt_rows(rows: int) -> frozenset[int]:
    """Validation rows as `datasets.Dataset.train_test_split` draws them for nanoGPT, by calling it."""
    if rows < 2:
        raise ConfigError(
            f"corpus.split nanogpt: the corpus has too few rows to divide ({rows}); use corpus.split=hash"
        )
    try:
        import datasets
    except ImportError:
        raise DataError("corpus.split nanogpt: needs the package datasets: pip install datasets") from None
    import numpy as np
    import pyarrow

    numbers = datasets.Dataset(pyarrow.table({"row": np.arange(rows)}), fingerprint=f"rows-{rows}")
    sides = numbers.train_test_split(test_size=NANOGPT_SHARE, seed=NANOGPT_SEED, shuffle=True, keep_in_memory=True)
    return frozenset(sides["test"]["row"])
