"""Tasks that hide several needles behind drawn places of a haystack and end in a question and an answer's beginning."""

import zlib
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, compress

import numpy as np

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.evaluation.retrieval.haystacks import Hay, hidden
from tost_lm.evaluation.retrieval.interface import Example, Task

Parts = tuple[str, ...]
"""A text in parts that are encoded apart, so that a key or value has the same ids wherever it stands."""


@dataclass(frozen=True)
class Puzzle:
    """What one example hides and asks for, whatever its length."""

    intro: str
    needles: tuple[Parts, ...]
    """In the order of the text; each ends its line."""
    asked: tuple[bool, ...]
    """Of each needle, whether the answer needs it: the control goes without."""
    question: Parts
    """Up to the beginning of the answer."""
    references: tuple[str, ...]
    answer: Parts
    others: Iterator[Parts]
    """More needles, whose keys are not asked for; perhaps none."""


class PuzzleTask(Task):
    """What the tasks share; they say what a puzzle is, and what it is hidden in."""

    def __init__(self, name: str, seed: int, tokenizer: Tokenizer):
        self.name, self.seed, self.tokenizer = name, seed, tokenizer

    @abstractmethod
    def puzzle(self, draws: np.random.Generator) -> Puzzle: ...

    @abstractmethod
    def hay(self, puzzle: Puzzle, length: int, tokens: int, draws: np.random.Generator) -> Hay:
        """Of `tokens` tokens at most."""

    def needed(self, samples: int) -> int:
        puzzles = (self.puzzle(self._draws(sample)) for sample in range(samples))
        return max(self._frame(puzzle) + sum(map(len, self._needles(puzzle))) for puzzle in puzzles)

    def example(self, length: int, depth: float | None, sample: int) -> tuple[Example, Example]:
        puzzle, draws = self.puzzle(self._draws(sample)), self._draws(sample, length)
        tokens = length - self._frame(puzzle)
        hay = self.hay(puzzle, length, tokens, draws)
        needles, depths = self._needles(puzzle), np.sort(draws.random(len(puzzle.needles))).tolist()
        intro, question = self.tokenizer.encode(puzzle.intro), self.encode(puzzle.question)

        def asked(shown: tuple[bool, ...]) -> Example:
            here = list(compress(needles, shown))
            text = hidden(self.tokenizer, hay(tokens - sum(map(len, here))), here, list(compress(depths, shown)))
            return Example(
                prompt=np.concatenate([[self.tokenizer.eot], intro, text, question]),
                question="".join(puzzle.question).strip(),
                references=puzzle.references,
                options=(tuple(self.encode(puzzle.answer)),),
                right=0,
            )

        return asked((True,) * len(needles)), asked(tuple(not needed for needed in puzzle.asked))

    def encode(self, parts: Parts) -> list[int]:
        return list(chain.from_iterable(map(self.tokenizer.encode, parts)))

    def _draws(self, *place: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, zlib.crc32(self.name.encode()), *place))

    def _needles(self, puzzle: Puzzle) -> list[list[int]]:
        return [self.encode(parts) for parts in puzzle.needles]

    def _frame(self, puzzle: Puzzle) -> int:
        """Tokens of a cell besides needles and haystack."""
        intro = self.tokenizer.encode(puzzle.intro)
        return 1 + len(intro) + len(self.encode(puzzle.question)) + self.room
