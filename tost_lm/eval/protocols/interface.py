"""Interface of a zero-shot protocol: it reads a file in its published format as examples, and sums up their scores."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import DataError
from tost_lm.eval.data_sets import unpacked
from tost_lm.inference.likelihood import Request

GPT2_SAMPLE, GPT2_EOT = [15496, 995, 11, 2125, 470, 340, 13130, 30], 50256

Row = dict[str, Any]
"""The result of an example, a line of JSON."""


@dataclass(frozen=True)
class Example:
    requests: tuple[Request, ...]
    facts: Row
    """Entries of its row beside the scores."""


class Protocol(ABC):
    """One way to measure a model on one test set. A changed protocol gets a new name.

    Attributes:
        name: `TEST SET@RULES`.
        data_set: the key in [sets] of its file.
        headline: the total that is cited.
        by_token: whether the headline depends on the tokenizer.
        new_tokens: length of the text that is generated greedily after the context of an example's only request; 0:
            the targets of its requests are scored.
    """

    name: str
    data_set: str
    headline: str
    by_token: bool = False
    new_tokens: int = 0

    @abstractmethod
    def examples(self, path: Path, tokenizer: Tokenizer, window: int) -> Sequence[Example]:
        """All examples of a file, for a model that reads at most `window` tokens at once.

        Raises:
            DataError: the file has a different format; names the file, and the line if there are lines.
        """

    @abstractmethod
    def row(self, example: Example, scores: Any) -> Row:
        """The row of an example; `scores` are Likelihoods of its requests, or with `new_tokens` the generated text."""

    @abstractmethod
    def totals(self, rows: Sequence[Row]) -> Row:
        """The results, each with its denominator and a standard error."""


def is_gpt2_tokenizer(tokenizer: Tokenizer) -> bool:
    """Whether it encodes a sample text as GPT-2's tokenizer does."""
    return tokenizer.encode("Hello world, isn't it 2019?") == GPT2_SAMPLE and tokenizer.eot == GPT2_EOT


def read_text(path: Path) -> str:
    """A UTF-8 file, decompressed if its name ends in .gz. Raises DataError, naming file and line."""
    data = unpacked(path)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise DataError(
            f"{path}, line {line}: not UTF-8 (byte 0x{data[error.start]:02x}); give the published file"
        ) from None


def read_json_lines(path: Path, expected: str) -> Iterator[tuple[str, Any]]:
    """The place, for error messages, and the value of each line. Raises DataError; `expected` describes the file."""
    text = read_text(path)
    lines = text.removesuffix("\n").split("\n")  # not splitlines: JSON strings may contain other line ends
    for number, line in enumerate(lines, start=1):
        try:
            yield f"{path}, line {number}", json.loads(line)
        except ValueError:
            raise wrong_format(path, text, expected, number) from None


def wrong_format(path: Path, text: str, expected: str, line: int = 1) -> DataError:
    """The error for a file of another format: what it looks like, and what is expected."""
    formats = {
        "an empty file": r"\s*$",
        "JSON lines": r'\s*\{\s*"',
        "XML": r"\s*<\w",
        "questions of the Children's Book Test": r"\s*1 .*\n2 ",
        "a WikiText file": r"\s*= [^=]+ = *\n",
        "text in lower case": r"[^A-Z]*$",
    }
    likely = next((name for name, pattern in formats.items() if re.match(pattern, text[:1000])), "plain text")
    return DataError(f"{path}, line {line}: wrong format, the file looks like {likely}; give {expected}")


def to_array(rows: Sequence[Row], key: str) -> np.ndarray:
    """A column of rows, float64."""
    return np.array([row[key] for row in rows], dtype=np.float64)
