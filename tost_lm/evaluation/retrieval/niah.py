"""Needles in a haystack in the forms that RULER gave them (arXiv 2404.06654), in words of our own.

    [EOT] Some secret numbers stand in the text below. Remember them.
    haystack … The secret number of KEY is 1234567. … haystack
    Question: What is the secret number of KEY?
    Answer: The secret number of KEY is → 1234567

Keys are pairs of words or UUIDs, values numbers of seven digits or UUIDs. Depths are drawn, and a needle stands behind
the end of a line or sentence. Where several values are asked for, the answer lists them: those of one key in the order
of the text, those of several keys in that of the question. As many tokens are left for the answer as it has bytes,
which any tokenizer can do with. The control lacks the needles of the keys that are asked for and has those of others.
Who copies any value of the text, whatever its key, is right once in four in niah_multikey_1, and more rarely in
niah_multikey_2 and 3.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Literal

import numpy as np

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.evaluation.retrieval.haystacks import Hay, Text, needles_hay, noise_hay, text_hay
from tost_lm.evaluation.retrieval.puzzle import Parts, Puzzle, PuzzleTask
from tost_lm.evaluation.retrieval.words import listed, numbers, uuids, word_keys

Draw = Callable[[np.random.Generator], Iterator[str]]


@dataclass(frozen=True)
class Values:
    """What is hidden."""

    name: str
    draw: Draw
    characters: int
    chance: float
    """That a guess is right."""


NUMBERS = Values("number", lambda draws: numbers(draws, 7), 7, 1 / 9_000_000)
UUIDS = Values("ID", uuids, 36, 2.0**-122)


@dataclass(frozen=True)
class Form:
    """What makes up a task."""

    hay: Literal["noise", "text", "needles"]
    """`needles`: those of other keys, as many as fit."""
    keys: int = 1
    """Keys in the text, apart from such a haystack."""
    values: int = 1
    """Values of each."""
    asked: int = 1
    """Keys that are asked for."""
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
    """One of the forms."""

    def __init__(self, name: str, seed: int, tokenizer: Tokenizer, text: Callable[[], Text]):
        """`text` gives what hides the needles, where that is text."""
        super().__init__(name, seed, tokenizer)
        self.form = FORMS[name]
        self.text = text() if self.form.hay == "text" else None
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

    def hay(self, puzzle: Puzzle, length: int, tokens: int, draws: np.random.Generator) -> Hay:
        if self.form.hay == "needles":
            return needles_hay(self.tokenizer, map(self.encode, puzzle.others))
        return text_hay(self.text, length, tokens, draws) if self.text else noise_hay(self.tokenizer)

    def _needle(self, key: str, value: str) -> Parts:
        return f" The secret {self.form.value.name} of", f" {key}", " is", f" {value}", ".\n"
