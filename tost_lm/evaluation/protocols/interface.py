"""What a zero-shot protocol is: a file in its usual format, read as examples, scored, and summed up."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import DataError
from tost_lm.evaluation.data_sets import unpacked
from tost_lm.evaluation.likelihood import Likelihoods, Request

GPT2_SAMPLE, GPT2_EOT = [15496, 995, 11, 2125, 470, 340, 13130, 30], 50256

Row = dict[str, Any]
"""What is written of an example, a line of JSON."""


@dataclass(frozen=True)
class Example:
    requests: tuple[Request, ...]
    facts: Row
    """What its row says beside the scores."""


class Protocol(ABC):
    """One way to measure a model on one text, by a name that a change of it changes.

    Attributes: `name`; `data_set`, the key of [sets] that names its file; `headline`, which of the totals is cited;
    `by_token`, whether it depends on how the tokenizer cuts the text, so that other tokenizers' figures are others.
    """

    name: str
    data_set: str
    headline: str
    by_token: bool = False

    @abstractmethod
    def examples(self, path: Path, tokenizer: Tokenizer, window: int) -> Sequence[Example]:
        """All examples of a file, for a model that reads at most `window` tokens at once.

        Raises:
            DataError: the file is not in the format; names file and line.
        """

    @abstractmethod
    def row(self, example: Example, scores: Likelihoods) -> Row:
        """What is written of an example whose requests have these scores."""

    @abstractmethod
    def totals(self, rows: Sequence[Row]) -> Row:
        """The results, each with its denominator and a standard error."""


def is_gpt2s(tokenizer: Tokenizer) -> bool:
    """Whether it cuts texts as GPT-2's does, by a sample."""
    return tokenizer.encode("Hello world, isn't it 2019?") == GPT2_SAMPLE and tokenizer.eot == GPT2_EOT


def read_text(path: Path) -> str:
    """A UTF-8 file, or one in gzip where the name ends in .gz. Raises DataError, naming file and line."""
    data = unpacked(path)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise DataError(f"{path}, line {line}: not UTF-8 (byte 0x{data[error.start]:02x})") from None


def to_array(rows: Sequence[Row], key: str) -> np.ndarray:
    """A column of rows, float64."""
    return np.array([row[key] for row in rows], dtype=np.float64)
