"""Needle-in-a-haystack tasks with the structure of RULER's (arXiv 2404.06654) and sentences of our own.

    [EOT] Some secret numbers stand in the text below. Remember them.
    haystack … The secret number of KEY is 1234567. … haystack
    Question: What is the secret number of KEY?
    Answer: The secret number of KEY is → 1234567

Keys are pairs of words or UUIDs. Values are numbers of seven digits or UUIDs. Depths are drawn, and a needle follows
the end of a line or sentence. If the question asks for several values, the answer lists them: the values of one key in
the order of the text, those of several keys in the order of the question. The room for the answer is as many tokens as
it has bytes, which suffices for any tokenizer. The control lacks the needles that the question asks for and keeps the
others. A model that copies a random value of the text is right once in four in niah_multikey_1, and less often in
niah_multikey_2 and 3.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Literal

import numpy as np

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.evaluation.retrieval.haystacks import Haystack, Text, needles_haystack, noise_haystack, text_haystack
from tost_lm.evaluation.retrieval.puzzle import Puzzle, PuzzleTask, Strings
from tost_lm.evaluation.retrieval.words import listed, numbers, uuids, word_keys

Draw = Callable[[np.random.Generator], Iterator[str]]


@dataclass(frozen=True)
class Values:
    """A kind of values."""

    name: str
    draw: Draw
    characters: int
    chance: float
    """Probability that a guess is right."""


NUMBERS = Values("number", lambda draws: numbers(draws, 7), 7, 1 / 9_000_000)
UUIDS = Values("ID", uuids, 36, 2.0**-122)


@dataclass(frozen=True)
class Form:
    """The definition of a task."""

    haystack: Literal["noise", "text", "needles"]
    """`needles`: as many needles with other keys as fit."""
    keys: int = 1
    """Keys in the text, not counting a haystack of needles."""
    values: int = 1
    """Values per key."""
    asked: int = 1
    """Keys that the question asks for."""
    key: Draw = word_keys
    value: Values = NUMBERS

    @property
    def answers(self) -> int:
        return self.asked * self.values


FORMS = {
    "niah_single_1@own-words": Form("noise"),
    "niah_single_2@own-words": Form("text"),
    "niah_single_3@own-words": Form("text", value=UUIDS),
    "niah_multikey_1@own-words": Form("text", keys=4),
    "niah_multikey_2@own-words": Form("needles", keys=4),
    "niah_multikey_3@own-words": Form("needles", keys=4, key=uuids, value=UUIDS),
    "niah_multivalue@own-words": Form("text", values=4),
    "niah_multiquery@own-words": Form("text", keys=4, asked=4),
}


class NiahTask(PuzzleTask):
    """The task of one form."""

    def __init__(self, name: str, seed: int, tokenizer: Tokenizer, text: Callable[[], Text]):
        """`text` returns the text of the haystack; it is called only if the form needs it."""
        super().__init__(name, seed, tokenizer)
        self.form = FORMS[name]
        self.text = text() if self.form.haystack == "text" else None
        self.chance = self.form.answers * self.form.value.chance
        self.room = sum(map(len, listed(["x" * self.form.value.characters] * self.form.answers)))

    def puzzle(self, draws: np.random.Generator) -> Puzzle:
        form, name = self.form, self.form.value.name
        keys, values = form.key(draws), form.value.draw(draws)
        held = [(key, list(islice(values, form.values))) for key in islice(keys, form.keys)]
        asked = [held[i] for i in draws.permutation(form.keys)[: form.asked]]
        references = list(chain.from_iterable(own for _, own in asked))
        several = "s" if form.answers > 1 else ""
        asked_for = listed([key for key, _ in asked])
        wanted = {key for key, _ in asked}
        pairs = [(key, value) for key, own in held for value in own]
        return Puzzle(
            intro=f"Some secret {name}s stand in the text below. Remember them.\n",
            needles=tuple(self._needle(key, value) for key, value in pairs),
            asked=tuple(key in wanted for key, _ in pairs),
            question=(
                f"\nQuestion: What {'are' if several else 'is'} the secret {name}{several} of", *asked_for, "?",
                f"\nAnswer: The secret {name}{several} of", *asked_for, " are" if several else " is",
            ),
            references=tuple(references),
            answer=tuple(listed(references)),
            others=map(self._needle, keys, values),
        )  # fmt: skip

    def haystack(self, puzzle: Puzzle, length: int, tokens: int, draws: np.random.Generator) -> Haystack:
        if self.form.haystack == "needles":
            return needles_haystack(self.tokenizer, map(self.encode, puzzle.others))
        return text_haystack(self.text, length, tokens, draws) if self.text else noise_haystack(self.tokenizer)

    def _needle(self, key: str, value: str) -> Strings:
        return f" The secret {self.form.value.name} of", f" {key}", " is", f" {value}", ".\n"
