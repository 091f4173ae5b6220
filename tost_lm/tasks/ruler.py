"""Retrieval tasks with the structure of RULER's (arXiv 2404.06654) and sentences of our own: needles in several forms,
variable tracking.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, pairwise
from typing import Literal

import numpy as np

from tost_lm.tasks.grid import GridTask, section
from tost_lm.tasks.haystacks import (
    Haystack,
    listed,
    needles_haystack,
    noise_haystack,
    numbers,
    text_haystack,
    uuids,
    variables,
    word_keys,
)
from tost_lm.tasks.queries import GridConfig, Puzzle, PuzzleQueries, QuerySource, Strings
from tost_lm.tasks.task import Family


class RulerConfig(GridConfig):
    """Tasks with the structure of RULER's."""

    section = "ruler"


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
    """The definition of a needle-in-a-haystack task."""

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


def _room(answers: int, characters: int) -> int:
    """Tokens that suffice for a list of answers in any tokenizer: one for each byte."""
    return sum(map(len, listed(["x" * characters] * answers)))


class NiahQueries(PuzzleQueries):
    """Needle-in-a-haystack tasks with the structure of RULER's (arXiv 2404.06654) and sentences of our own.

        [EOT] Some secret numbers stand in the text below. Remember them.
        haystack … The secret number of KEY is 1234567. … haystack
        Question: What is the secret number of KEY?
        Answer: The secret number of KEY is → 1234567

    Keys are pairs of words or UUIDs. Values are numbers of seven digits or UUIDs. Depths are drawn, and a needle
    follows the end of a line or sentence. If the question asks for several values, the answer lists them: the values of
    one key in the order of the text, those of several keys in the order of the question. The room for the answer is as
    many tokens as it has bytes, which suffices for any tokenizer. The control lacks the needles that the question asks
    for and keeps the others. A model that copies a random value of the text is right once in four in niah_multikey_1,
    which is its chance, and less often in niah_multikey_2 and 3.
    """

    def __init__(self, name: str, source: QuerySource, form: Form):
        super().__init__(name, source)
        self.form, self.text = form, source.find_text() if form.haystack == "text" else None
        is_one_of_few = form.haystack != "needles" and form.asked < form.keys
        self.chance = form.asked / form.keys if is_one_of_few else form.answers * form.value.chance
        self.room = _room(form.answers, form.value.characters)

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


HOPS, LETTERS, DIGITS = 4, 5, 5


class VariableTracking(PuzzleQueries):
    """Variable tracking, task `vt@own-words`: RULER's structure (arXiv 2404.06654) with sentences of our own.

        [EOT] The text below sets variables. Keep track of which of them have the same value.
        noise … VAR ABCDE = 12345 … noise … VAR FGHIJ = VAR ABCDE … noise
        Question: Which variables have the value 12345?
        Answer: The variables with the value 12345 are → ABCDE, FGHIJ, … and UVWXY

    There is one chain of four hops. Its lines are in order, at drawn depths. The answer names all five variables. The
    prompt has no worked example. The control has no line of the chain.
    """

    chance = (HOPS + 1) / 26**LETTERS
    room = _room(HOPS + 1, LETTERS)

    def puzzle(self, draws: np.random.Generator) -> Puzzle:
        names = list(islice(variables(draws, LETTERS), HOPS + 1))
        value = next(numbers(draws, DIGITS))
        first = (" VAR", f" {names[0]}", " =", f" {value}", "\n")
        return Puzzle(
            intro="The text below sets variables. Keep track of which of them have the same value.\n",
            needles=(first, *((" VAR", f" {b}", " = VAR", f" {a}", "\n") for a, b in pairwise(names))),
            asked=(True,) * len(names),
            question=(
                "\nQuestion: Which variables have the value", f" {value}", "?",
                "\nAnswer: The variables with the value", f" {value}", " are",
            ),
            references=tuple(names),
            answer=tuple(listed(names)),
            others=iter(()),
        )  # fmt: skip

    def haystack(self, puzzle: Puzzle, length: int, tokens: int, draws: np.random.Generator) -> Haystack:
        return noise_haystack(self.tokenizer)


def _niah(name: str, about: str, form: Form) -> GridTask:
    return GridTask(f"niah_{name}@own-words", about, partial(NiahQueries, form=form))


FAMILY = Family(
    "ruler",
    [
        _niah("single_1", "one key with a number of seven digits, in repeated sentences", Form("noise")),
        _niah("single_2", "one key with a number, in a text", Form("text")),
        _niah("single_3", "one key with a UUID, in a text", Form("text", value=UUIDS)),
        _niah("multikey_1", "four keys in a text; the question asks for one", Form("text", keys=4)),
        _niah("multikey_2", "a text of keys and numbers only; the question asks for one", Form("needles", keys=4)),
        _niah(
            "multikey_3",
            "a text of UUIDs as keys and values; the question asks for one",
            Form("needles", keys=4, key=uuids, value=UUIDS),
        ),
        _niah("multivalue", "one key with four numbers in a text; the question asks for all", Form("text", values=4)),
        _niah("multiquery", "four keys in a text; the question asks for all", Form("text", keys=4, asked=4)),
        GridTask(
            "vt@own-words", "a chain of five variables; the question asks for those with a value", VariableTracking
        ),
    ],
    RulerConfig,
    section,
)
