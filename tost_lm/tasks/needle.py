"""Needles in a haystack: words of several names in a long text, one of which is asked, by length and depth."""

from typing import Annotated, Any

import numpy as np
from pydantic import Field

from tost_lm.data.passages import TEST_NAMES, TEST_WORDS
from tost_lm.tasks.grid import GridTask, section
from tost_lm.tasks.haystacks import insert_needles, text_haystack
from tost_lm.tasks.queries import GridConfig, Queries, Query, QuerySource
from tost_lm.tasks.task import Family

NAME = "needle@keys"


class NeedleConfig(GridConfig):
    """Task `needle@keys`."""

    section = "needle"
    depths: list[Annotated[float, Field(ge=0, le=1)]] = Field(default=[0.0, 0.25, 0.5, 0.75, 1.0], min_length=1)
    """Positions of the needle in the text before the question, from 0 (beginning) to 1 (end)."""
    keys: int = Field(default=4, ge=1, le=len(TEST_NAMES))
    """Names in the text, each with a word of its own; the question asks for one."""


class NeedleQueries(Queries):
    """Needles in a haystack, task `needle@keys` (after Kamradt 2023, small enough for a small model).

        [EOT] haystack … In secret they named NAME WORD. … haystack ⏎ In secret they named NAME → WORD

    The haystack is text in a fixed order. The prompt and the room for the longest word have exactly the cell's length
    in tokens. The needle that is asked for is at the cell's depth, the others, with other names and words, at drawn
    depths; each is moved back to the end of a line or sentence. No recall passage (`tost_lm/data/passages.py`) has the
    sentence, a name or a word. Beside the scores of all tasks, `choice` is whether the right word is the most likely of
    16 (by the total log-probability of its tokens). The chance is that of a guess among the words in the text, one in
    `keys`. The control has a haystack of the same length with the other needles only.
    """

    def __init__(self, name: str, source: QuerySource):
        super().__init__(name, source)
        self.text, self.depths = source.find_text(), tuple(dict.fromkeys(source.settings.depths))
        self.keys = source.settings.keys
        self.chance = 1 / self.keys
        self.candidates = tuple(tuple(self.tokenizer.encode(f" {word}")) for word in TEST_WORDS)
        self.room = max(map(len, self.candidates))

    def identity(self, settings: GridConfig) -> dict[str, Any]:
        return super().identity(settings) | {"keys": self.keys}

    def needed(self, samples: int) -> int:
        needles = sorted(max(len(self._needle(name, word)) for word in range(len(TEST_WORDS))) for name in TEST_NAMES)
        return 1 + sum(needles[-self.keys :]) + max(len(self._question(name)) for name in TEST_NAMES) + self.room

    def query(self, length: int, depth: float | None, sample: int) -> tuple[Query, Query]:
        assert depth is not None
        assert self.text is not None
        draws = np.random.default_rng((self.seed, length, round(depth * 1e6), sample))
        names = [TEST_NAMES[n] for n in draws.permutation(len(TEST_NAMES))[: self.keys]]
        words = draws.permutation(len(TEST_WORDS))[: self.keys].tolist()
        question, right = self._question(names[0]), words[0]
        tokens = length - self.room - 1 - len(question)
        haystack = text_haystack(self.text, length, tokens, draws)
        depths = [depth, *draws.random(self.keys - 1).tolist()]
        needles = list(map(self._needle, names, words))

        def make(shown: slice) -> Query:
            placed = sorted(zip(depths[shown], needles[shown], strict=True))
            around = haystack(tokens - sum(len(needle) for _, needle in placed))
            text = insert_needles(self.tokenizer, around, [needle for _, needle in placed], [at for at, _ in placed])
            prompt = np.concatenate([[self.tokenizer.eot], text, question])
            return Query(prompt, stated(names[0]), (TEST_WORDS[right],), self.candidates, right)

        return make(slice(None)), make(slice(1, None))

    def _needle(self, name: str, word: int) -> list[int]:
        # Encoded separately, so that the word has the ids of the candidate.
        return [*self.tokenizer.encode(f" {stated(name)}"), *self.candidates[word], *self.tokenizer.encode(".\n")]

    def _question(self, name: str) -> list[int]:
        return [*self.tokenizer.encode("\n"), *self.tokenizer.encode(stated(name))]


def stated(name: str) -> str:
    """The beginning of the sentence, which the word follows."""
    return f"In secret they named {name}"


FAMILY = Family(
    "needle",
    [
        GridTask(
            NAME,
            "words of four names in a text, one of which is asked: a grid of length by depth",
            NeedleQueries,
            "choice_accuracy",
            column=("needle choice accuracy", ".1%"),
        )
    ],
    NeedleConfig,
    section,
)
