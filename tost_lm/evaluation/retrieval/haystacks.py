"""What needles are hidden in, in tokens: text, or a few plain sentences over and over."""

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from tost_lm.data.shards import Shards
from tost_lm.data.sources.embedded import embedded_texts
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.data.tokenizers.piecewise import encode_blocks
from tost_lm.errors import DataError
from tost_lm.evaluation.text import TextFile

SENTENCE_ENDS = (".", "!", "?")
NOISE = (
    "A boat lies in the harbor.\nThe bread on the table is warm.\nTwo birds sit on the roof.\n"
    "The path goes down to the river.\nIt rained a little in the morning.\n"
)
BETWEEN = "\n\n"
SPREAD, SPREAD_TOKENS = 64, 1 << 22

Hay = Callable[[int], np.ndarray]
"""A haystack of n tokens for an example, int64 [n]."""


class Text:
    """A text in a fixed order, of which no more is read than is needed.

    `name` is what errors call it, `facts` tell it from others in an identity, `shards` are those that it comes from.
    """

    def __init__(
        self, name: str, parts: Iterable[np.ndarray], facts: dict[str, str], shards: Shards | None = None
    ) -> None:
        """`parts` are its ids in arrays of any length."""
        self.name, self.facts, self.shards = name, facts, shards
        self._parts, self._read = iter(parts), np.empty(0, np.int64)
        self._ends = [0]

    def for_length(self, length: int) -> np.ndarray:
        """What haystacks of so many tokens are taken from, int64: the parts that make up 64 times as much, whatever
        else was read.

        Raises:
            DataError: there are fewer tokens than `length`.
        """
        wanted = min(SPREAD * length, length + SPREAD_TOKENS)
        parts = [self._read]
        while self._ends[-1] < wanted and (part := next(self._parts, None)) is not None:
            parts.append(part.astype(np.int64))
            self._ends.append(self._ends[-1] + len(part))
        if parts[1:]:
            self._read = np.concatenate(parts)
        if len(self._read) < length:
            raise DataError(
                f"{self.name} has {len(self._read):,} tokens, too few for retrieval.lengths {length:,}; give a longer "
                "text (retrieval.haystack=FILE) or shorter lengths"
            )
        return self._read[: self._ends[min(bisect_left(self._ends, wanted), len(self._ends) - 1)]]

    @classmethod
    def of_file(cls, path: Path, tokenizer: Tokenizer) -> "Text":
        """Raises DataError: no such file, empty, or not UTF-8."""
        file = TextFile.check(path, "retrieval.haystack")
        facts = {"text": str(path), "text_sha256": file.sha256}
        return cls(f"retrieval.haystack {path}", encode_blocks(tokenizer, file.blocks()), facts)

    @classmethod
    def of_shards(cls, shards: Shards, tokenizer: Tokenizer) -> "Text":
        """The held-out documents."""
        return cls(f"the held-out text of {shards.folder}", _joined(shards.documents("valid"), tokenizer), {}, shards)

    @classmethod
    def embedded(cls, tokenizer: Tokenizer) -> "Text":
        """Raises DataError where this Python has no documentation."""
        digest = hashlib.sha256()
        for text in embedded_texts():
            digest.update(text.encode(errors="replace"))
        facts = {"text": "documentation of Python", "text_sha256": digest.hexdigest()}
        parts = (tokenizer.encode_array(text.encode(errors="replace").decode()) for text in embedded_texts())
        return cls("the documentation of Python", _joined(parts, tokenizer), facts)


def text_hay(text: Text, length: int, tokens: int, draws: np.random.Generator) -> Hay:
    """So many tokens of a text, from a place that is drawn."""
    source = text.for_length(length)
    start = int(draws.integers(len(source) - tokens + 1))
    return lambda n: source[start : start + n]


def noise_hay(tokenizer: Tokenizer) -> Hay:
    """Plain sentences over and over; what is cut off is the beginning of the first."""
    cycle = np.array(tokenizer.encode(NOISE))
    return lambda n: np.resize(cycle[::-1], n)[::-1]


def needles_hay(tokenizer: Tokenizer, needles: Iterator[Sequence[int]]) -> Hay:
    """As many whole needles of an endless sequence as fit, behind what fills the rest: plain sentences."""
    drawn: list[Sequence[int]] = []
    filling = noise_hay(tokenizer)

    def hay(n: int) -> np.ndarray:
        parts: list[Sequence[int]] = []
        rest = n
        while True:
            if len(parts) == len(drawn):
                drawn.append(next(needles))
            needle = drawn[len(parts)]
            if len(needle) > rest:
                return np.concatenate([filling(rest), *parts]).astype(np.int64)
            parts.append(needle)
            rest -= len(needle)

    return hay


def hidden(
    tokenizer: Tokenizer, hay: np.ndarray, needles: Sequence[Sequence[int]], depths: Sequence[float]
) -> np.ndarray:
    """The haystack with a needle at each depth, moved back to the end of a line or sentence: int64. Depths rise."""
    parts, begin = [], 0
    for needle, depth in zip(needles, depths, strict=True):
        cut = place(tokenizer, hay, depth)
        parts += [hay[begin:cut], needle]
        begin = cut
    return np.concatenate([*parts, hay[begin:]]).astype(np.int64)


def place(tokenizer: Tokenizer, hay: np.ndarray, depth: float) -> int:
    """The last end of a line or sentence at or before the depth; 0 if there is none.

    A sentence ends where white space follows its mark, which stands in the next token.
    """
    for cut in range(round(depth * len(hay)), 0, -1):
        # Three tokens hold any ending, unless one of them is a lone byte of it.
        around = hay[max(0, cut - 3) : cut + 1].tolist()
        before = tokenizer.decode(around[: min(cut, 3)])
        behind = tokenizer.decode(around)[len(before) :]
        if before.endswith("\n") or (before.endswith(SENTENCE_ENDS) and (cut == len(hay) or behind[:1].isspace())):
            return cut
    return 0


def _joined(documents: Iterable[np.ndarray], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    between = tokenizer.encode_array(BETWEEN)
    for document in documents:
        yield np.concatenate([document, between])
