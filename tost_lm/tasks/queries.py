"""Queries: texts of an exact length that end in a question, each with a control."""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, compress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import numpy as np
from pydantic import AfterValidator, Field, PositiveInt

from tost_lm.config import Section
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import ConfigError
from tost_lm.inference.effective_length import RULER_THRESHOLD
from tost_lm.tasks.haystacks import Haystack, Text, insert_needles

if TYPE_CHECKING:
    from tost_lm.inference.generation import ModelFacts


@dataclass(frozen=True)
class Query:
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


IN_ORDER = AfterValidator(lambda numbers: sorted(set(numbers)))
"""Of numbers in a setting: ascending, each once."""


class GridConfig(Section):
    """Settings of tasks that have cells."""

    section: ClassVar[str]
    """Its name, for errors."""
    lengths: Annotated[list[PositiveInt], IN_ORDER] = Field(default_factory=list)
    """Tokens of prompt and answer together; empty: a quarter, half and all of model.context_length."""
    samples: int = Field(default=8, gt=0)
    """Examples per cell."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the texts, keys and values."""
    haystack: Path | None = None
    """A UTF-8 file for haystacks; default: the held-out documents, or Python's documentation if there are none."""

    threshold: float = Field(default=RULER_THRESHOLD, gt=0, le=1)
    """The effective length is the longest one with at least this mean score; default: RULER's."""


class QuerySource(NamedTuple):
    """What queries are made from."""

    settings: Any
    """A GridConfig."""
    tokenizer: Tokenizer
    find_text: Callable[[], Text]
    """Finds the text of haystacks."""


class Queries(ABC):
    """Makes the queries of one task for one tokenizer.

    A query depends only on the seed, the tokenizer, the haystack, and its length, depth and number. It does not
    depend on other cells or on the number of queries.

    Attributes:
        name: of the task.
        chance: expected score of a guess of the right form: among the values in the text if a few keys stand in it and
            not all are asked, else without the text.
        room: tokens left for the answer.
        depths: depths of the grid's cells; (None,) if depths are drawn.
        text: source of the haystacks; None: they are generated.
    """

    chance: float
    room: int
    depths: tuple[float | None, ...] = (None,)
    text: Text | None = None

    def __init__(self, name: str, source: QuerySource):
        """Raises TostError if there is no text for them."""
        self.name, self.tokenizer, self.seed = name, source.tokenizer, source.settings.seed

    @abstractmethod
    def needed(self, samples: int) -> int:
        """Maximum over the first `samples` queries of the tokens besides the haystack, with room for the answer."""

    @abstractmethod
    def query(self, length: int, depth: float | None, sample: int) -> tuple[Query, Query]:
        """The query, and its control: the same question after a text without the needles.

        Both prompts have `length` − `room` tokens. `length` must be greater than `needed`.

        Raises:
            DataError: `text` is shorter than the length.
        """

    def lengths(self, settings: GridConfig, model: "ModelFacts") -> list[int]:
        """The lengths of the cells: those given, else what fits of a quarter, half and all of the context length.

        Raises:
            ConfigError: a length exceeds the limit, or is too short for needles, question and answer.
            DataError: the haystack's text is shorter than a length.
        """
        needed, limit, context = self.needed(settings.samples), model.position_limit, model.context_length
        quarters = [context // 4, context // 2, context]
        chosen = settings.lengths or [length for length in quarters if length > needed] or quarters[-1:]
        for length in chosen:
            if limit is not None and length > limit:
                raise ConfigError(
                    f"{settings.section}.lengths: {length} exceeds the model's positions ({limit}); lower it"
                )
            if length <= needed:
                raise ConfigError(
                    f"{settings.section}.lengths: {length} tokens are too few for {self.name}, whose texts without a "
                    f"haystack take {needed}; raise it"
                )
            if self.text:
                self.text.for_length(length)
        return chosen

    def identity(self, settings: GridConfig) -> dict[str, Any]:
        """The settings that the results depend on."""
        names = ("lengths", "samples", "seed", "threshold")
        depths = {} if self.depths == (None,) else {"depths": list(self.depths)}
        return {name: getattr(settings, name) for name in names} | depths

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


class PuzzleQueries(Queries):
    """Base class; a subclass defines the puzzle and the haystack."""

    @abstractmethod
    def puzzle(self, draws: np.random.Generator) -> Puzzle: ...

    @abstractmethod
    def haystack(self, puzzle: Puzzle, length: int, tokens: int, draws: np.random.Generator) -> Haystack:
        """A haystack of at most `tokens` tokens."""

    def needed(self, samples: int) -> int:
        puzzles = (self.puzzle(self.draws(sample)) for sample in range(samples))
        return max(self._frame(puzzle) + sum(map(len, self._needles(puzzle))) for puzzle in puzzles)

    def query(self, length: int, depth: float | None, sample: int) -> tuple[Query, Query]:
        puzzle, draws = self.puzzle(self.draws(sample)), self.draws(sample, length)
        tokens = length - self._frame(puzzle)
        haystack = self.haystack(puzzle, length, tokens, draws)
        needles, depths = self._needles(puzzle), np.sort(draws.random(len(puzzle.needles))).tolist()
        intro, question = self.tokenizer.encode(puzzle.intro), self.encode(puzzle.question)

        def make(shown: tuple[bool, ...]) -> Query:
            here = list(compress(needles, shown))
            around = haystack(tokens - sum(map(len, here)))
            text = insert_needles(self.tokenizer, around, here, list(compress(depths, shown)))
            return Query(
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
