"""Needle in a haystack: one secret word in a long text, by length and depth."""

from typing import Annotated

import numpy as np
from pydantic import Field

from tost_lm.data.passages import NAMES, WORDS, secret_line
from tost_lm.tasks.grid import GridConfig, GridTask, section
from tost_lm.tasks.haystacks import insert_needles, text_haystack
from tost_lm.tasks.queries import Queries, Query, QuerySource
from tost_lm.tasks.task import Family

NAME = "needle@words"


class NeedleConfig(GridConfig):
    """Task `needle@words`."""

    section = "needle"
    depths: list[Annotated[float, Field(ge=0, le=1)]] = Field(default=[0.0, 0.25, 0.5, 0.75, 1.0], min_length=1)
    """Positions of the needle in the text before the question, from 0 (beginning) to 1 (end)."""


class NeedleQueries(Queries):
    """Needle in a haystack, task `needle@words` (after Kamradt 2023, small enough for a small model).

        [EOT] haystack … The secret word of NAME is WORD. … haystack ⏎ The secret word of NAME is → WORD

    The haystack is text in a fixed order. The prompt and the room for the longest word have exactly the cell's length
    in tokens. The needle is at the cell's depth, moved back to the end of a line or sentence. WORD is one of ten words.
    Beside the scores of all tasks, `choice` is whether the right word is the most likely of the ten (by the total
    log-probability of its tokens; chance 10 %). The control has a haystack of the same length without the needle.
    """

    chance = 1 / len(WORDS)

    def __init__(self, name: str, source: QuerySource):
        super().__init__(name, source)
        self.text, self.depths = source.find_text(), tuple(dict.fromkeys(source.settings.depths))
        self.candidates = tuple(tuple(self.tokenizer.encode(f" {word}")) for word in WORDS)
        self.room = max(map(len, self.candidates))

    def needed(self, samples: int) -> int:
        return max(
            1 + len(self._needle(name, word)) + len(self._question(name)) + self.room
            for name in NAMES for word in range(len(WORDS))
        )  # fmt: skip

    def query(self, length: int, depth: float | None, sample: int) -> tuple[Query, Query]:
        assert depth is not None
        assert self.text is not None
        draws = np.random.default_rng((self.seed, length, round(depth * 1e6), sample))
        name, word = NAMES[draws.integers(len(NAMES))], int(draws.integers(len(WORDS)))
        needle, question = self._needle(name, word), self._question(name)
        tokens = length - self.room - 1 - len(question)
        haystack = text_haystack(self.text, length, tokens, draws)
        with_needle = insert_needles(self.tokenizer, haystack(tokens - len(needle)), [needle], [depth])

        def make(text: np.ndarray) -> Query:
            prompt = np.concatenate([[self.tokenizer.eot], text, question])
            return Query(prompt, secret_line(name), (WORDS[word],), self.candidates, word)

        return make(with_needle), make(haystack(tokens))

    def _needle(self, name: str, word: int) -> list[int]:
        # Encoded separately, so that the word has the ids of the candidate.
        return [*self.tokenizer.encode(f" {secret_line(name)}"), *self.candidates[word], *self.tokenizer.encode(".\n")]

    def _question(self, name: str) -> list[int]:
        return [*self.tokenizer.encode("\n"), *self.tokenizer.encode(secret_line(name))]


FAMILY = Family(
    "needle",
    [
        GridTask(
            NAME,
            "one secret word in a text: a grid of length by depth",
            NeedleQueries,
            "choice_accuracy",
            column=("needle choice accuracy", ".1%"),
        )
    ],
    NeedleConfig,
    section,
)
