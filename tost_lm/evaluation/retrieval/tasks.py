"""The interface of a retrieval task: examples of an exact length, each with a control."""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, compress

import numpy as np

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.evaluation.retrieval.haystacks import Haystack, Text, insert_needles


@dataclass(frozen=True)
class Example:
    """A text that ends in a question, and its answer."""

    prompt: np.ndarray
    """Ids, int64 [T]; the first is the end of text."""
    question: str
    """The end of the prompt, which the answer continues."""
    references: tuple[str, ...]
    """Strings that the answer must contain."""
    options: tuple[tuple[int, ...], ...]
    """Ids of the answers that are compared; a task without a comparison has only the right one."""
    right: int
    """Index of the right option."""


class Task(ABC):
    """Makes the examples of one protocol.

    An example depends only on the seed, the tokenizer, the haystack, and its length, depth and number. It does not
    depend on other cells or on the number of examples.

    Attributes:
        name: of the protocol.
        seed: of the examples.
        chance: expected score of a guess that has the right form and ignores the text.
        room: tokens left for the answer.
        depths: depths of the grid's cells; (None,) if depths are drawn.
        text: source of the haystacks; None: they are generated.
        conditions: names of the texts of an example. The first asks the question, the others are its controls.
    """

    name: str
    seed: int
    chance: float
    room: int
    depths: tuple[float | None, ...] = (None,)
    text: Text | None = None
    conditions: tuple[str, ...] = ("needle", "control")

    @abstractmethod
    def needed(self, samples: int) -> int:
        """Maximum over the first `samples` examples of the tokens besides the haystack, with room for the answer."""

    @abstractmethod
    def example(self, length: int, depth: float | None, sample: int) -> tuple[Example, ...]:
        """An example under each condition: the same question, for retrieval with and without the needles in the text.

        The first prompt has `length` − `room` tokens, and no other has more. `length` must be greater than `needed`.

        Raises:
            DataError: `text` is shorter than the length.
        """

    def facts(self, length: int) -> dict[str, int]:
        """More about the cells of a length, for their files."""
        return {}

    def draws(self, *place: int) -> np.random.Generator:
        """Random numbers of this task's seed for a place, for example a length and the number of an example."""
        return np.random.default_rng((self.seed, zlib.crc32(self.name.encode()), *place))


Strings = tuple[str, ...]
"""A text as strings that are encoded separately, so that a key or value has the same ids everywhere."""


@dataclass(frozen=True)
class Puzzle:
    """The needles and the question of one example; they do not depend on its length."""

    intro: str
    needles: tuple[Strings, ...]
    """In the order of the text; each ends with a line end."""
    asked: tuple[bool, ...]
    """Whether the answer needs each needle; the control lacks those needles."""
    question: Strings
    """With the beginning of the answer."""
    references: tuple[str, ...]
    answer: Strings
    others: Iterator[Strings]
    """More needles, with keys that the question does not ask for; perhaps none."""


class PuzzleTask(Task):
    """Base class; a task defines the puzzle and the haystack."""

    def __init__(self, name: str, seed: int, tokenizer: Tokenizer):
        self.name, self.seed, self.tokenizer = name, seed, tokenizer

    @abstractmethod
    def puzzle(self, draws: np.random.Generator) -> Puzzle: ...

    @abstractmethod
    def haystack(self, puzzle: Puzzle, length: int, tokens: int, draws: np.random.Generator) -> Haystack:
        """A haystack of at most `tokens` tokens."""

    def needed(self, samples: int) -> int:
        puzzles = (self.puzzle(self.draws(sample)) for sample in range(samples))
        return max(self._frame(puzzle) + sum(map(len, self._needles(puzzle))) for puzzle in puzzles)

    def example(self, length: int, depth: float | None, sample: int) -> tuple[Example, ...]:
        puzzle, draws = self.puzzle(self.draws(sample)), self.draws(sample, length)
        tokens = length - self._frame(puzzle)
        haystack = self.haystack(puzzle, length, tokens, draws)
        needles, depths = self._needles(puzzle), np.sort(draws.random(len(puzzle.needles))).tolist()
        intro, question = self.tokenizer.encode(puzzle.intro), self.encode(puzzle.question)

        def make(shown: tuple[bool, ...]) -> Example:
            here = list(compress(needles, shown))
            around = haystack(tokens - sum(map(len, here)))
            text = insert_needles(self.tokenizer, around, here, list(compress(depths, shown)))
            return Example(
                prompt=np.concatenate([[self.tokenizer.eot], intro, text, question]),
                question="".join(puzzle.question).strip(),
                references=puzzle.references,
                options=(tuple(self.encode(puzzle.answer)),),
                right=0,
            )

        return make((True,) * len(needles)), make(tuple(not needed for needed in puzzle.asked))

    def encode(self, strings: Strings) -> list[int]:
        return list(chain.from_iterable(map(self.tokenizer.encode, strings)))

    def _needles(self, puzzle: Puzzle) -> list[list[int]]:
        return [self.encode(needle) for needle in puzzle.needles]

    def _frame(self, puzzle: Puzzle) -> int:
        """Tokens of a cell besides the needles and the haystack."""
        intro = self.tokenizer.encode(puzzle.intro)
        return 1 + len(intro) + len(self.encode(puzzle.question)) + self.room
