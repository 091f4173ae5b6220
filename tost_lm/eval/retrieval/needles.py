"""Tasks whose answers stand in needles between other text: secrets, variables, facts of documents."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from typing import Literal

import numpy as np

from tost_lm.data.passages import NAMES, WORDS, secret_line
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.eval.retrieval.haystacks import (
    LONGEST_KEY,
    PAIRS,
    Haystack,
    Text,
    insert_needles,
    listed,
    needles_haystack,
    noise_haystack,
    numbers,
    text_haystack,
    uuids,
    variables,
    word_keys,
)
from tost_lm.eval.retrieval.tasks import Example, Puzzle, PuzzleTask, Strings, Task
from tost_lm.inference.protocol_names import NEEDLE, QUESTIONS


class NeedleTask(Task):
    """Needle in a haystack, protocol `needle@words` (after Kamradt 2023, small enough for a small model).

        [EOT] haystack … The secret word of NAME is WORD. … haystack ⏎ The secret word of NAME is → WORD

    The haystack is text in a fixed order. The prompt and the room for the longest word have exactly the cell's length
    in tokens. The needle is at the cell's depth, moved back to the end of a line or sentence. WORD is one of ten words.
    Beside the scores of all tasks, `choice` is whether the right word is the most likely of the ten (by the total
    log-probability of its tokens; chance 10 %). The control has a haystack of the same length without the needle.
    """

    name, chance = NEEDLE, 1 / len(WORDS)

    def __init__(self, seed: int, tokenizer: Tokenizer, text: Text, depths: Sequence[float]):
        self.seed, self.tokenizer, self.text = seed, tokenizer, text
        self.depths = tuple(depths)
        self.candidates = tuple(tuple(tokenizer.encode(f" {word}")) for word in WORDS)
        self.room = max(map(len, self.candidates))

    def needed(self, samples: int) -> int:
        return max(
            1 + len(self._needle(name, word)) + len(self._question(name)) + self.room
            for name in NAMES for word in range(len(WORDS))
        )  # fmt: skip

    def example(self, length: int, depth: float | None, sample: int) -> tuple[Example, Example]:
        assert depth is not None
        assert self.text is not None
        draws = np.random.default_rng((self.seed, length, round(depth * 1e6), sample))
        name, word = NAMES[draws.integers(len(NAMES))], int(draws.integers(len(WORDS)))
        needle, question = self._needle(name, word), self._question(name)
        tokens = length - self.room - 1 - len(question)
        haystack = text_haystack(self.text, length, tokens, draws)
        with_needle = insert_needles(self.tokenizer, haystack(tokens - len(needle)), [needle], [depth])

        def make(text: np.ndarray) -> Example:
            prompt = np.concatenate([[self.tokenizer.eot], text, question])
            return Example(prompt, secret_line(name), (WORDS[word],), self.candidates, word)

        return make(with_needle), make(haystack(tokens))

    def _needle(self, name: str, word: int) -> list[int]:
        # Encoded separately, so that the word has the ids of the candidate.
        return [*self.tokenizer.encode(f" {secret_line(name)}"), *self.candidates[word], *self.tokenizer.encode(".\n")]

    def _question(self, name: str) -> list[int]:
        return [*self.tokenizer.encode("\n"), *self.tokenizer.encode(secret_line(name))]


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
    and less often in niah_multikey_2 and 3.
    """

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


HOPS, LETTERS, DIGITS = 4, 5, 5


class VariableTracking(PuzzleTask):
    """Variable tracking, protocol `vt@own-words`: RULER's structure (arXiv 2404.06654) with sentences of our own.

        [EOT] The text below sets variables. Keep track of which of them have the same value.
        noise … VAR ABCDE = 12345 … noise … VAR FGHIJ = VAR ABCDE … noise
        Question: Which variables have the value 12345?
        Answer: The variables with the value 12345 are → ABCDE, FGHIJ, … and UVWXY

    There is one chain of four hops. Its lines are in order, at drawn depths. The answer names all five variables. The
    prompt has no worked example. The control has no line of the chain.
    """

    chance = (HOPS + 1) / 26**LETTERS

    def __init__(self, name: str, seed: int, tokenizer: Tokenizer):
        super().__init__(name, seed, tokenizer)
        self.room = sum(map(len, listed(["X" * LETTERS] * (HOPS + 1))))

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


class Questions(PuzzleTask):
    """Question answering from documents, protocols `qa_1@own-words` and `qa_2@own-words`: the structure of RULER's two
    (arXiv 2404.06654) with documents of our own, which no model has seen.

        [EOT] Answer the question from the documents below.
        … Document: The town of TOWN lies on the river RIVER. Its mayor is MAYOR, and its inn is called the INN. …
        Document: PERSON is a potter who was born in the town of TOWN. …
        Question: Who is the mayor of TOWN?                                       Answer: The mayor is → MAYOR
        Question: Who is the mayor of the town in which PERSON was born?          Answer: The mayor is → MAYOR

    The first question (`qa_1`) needs one document, the second (`qa_2`) two. Names are pairs of words and distinct. As
    many documents about other towns and persons as fit are between those that hold the answer. The control lacks only
    the latter, so a guess among the names of the same kind in the text is never right there.
    """

    chance = 1 / PAIRS

    def __init__(self, name: str, seed: int, tokenizer: Tokenizer):
        super().__init__(name, seed, tokenizer)
        self.hops = 2 if name == QUESTIONS[1] else 1
        self.room = LONGEST_KEY + 1

    def puzzle(self, draws: np.random.Generator) -> Puzzle:
        names = word_keys(draws)
        person, town, river, mayor, inn = islice(names, 5)
        subject, ask = ATTRIBUTES[draws.integers(len(ATTRIBUTES))]
        answer = {"river": river, "mayor": mayor, "inn": inn}[subject]
        asked = [f" {town}"] if self.hops == 1 else [" the town in which", f" {person}", " was born"]
        return Puzzle(
            intro="Answer the question from the documents below.\n",
            needles=(_town(town, river, mayor, inn), _person(person, town)),
            asked=(True, self.hops == 2),
            question=(f"\nQuestion: {ask} of", *asked, f"?\nAnswer: The {subject} is"),
            references=(answer,),
            answer=(f" {answer}",),
            others=_documents(names),
        )

    def haystack(self, puzzle: Puzzle, length: int, tokens: int, draws: np.random.Generator) -> Haystack:
        return needles_haystack(self.tokenizer, map(self.encode, puzzle.others))


ATTRIBUTES = (("river", "What is the river"), ("mayor", "Who is the mayor"), ("inn", "What is the inn"))


def _town(town: str, river: str, mayor: str, inn: str) -> Strings:
    middle = " Its mayor is", f" {mayor}", ", and its inn is called the", f" {inn}"
    return "Document: The town of", f" {town}", " lies on the river", f" {river}", ".", *middle, ".\n"


def _person(person: str, town: str) -> Strings:
    return "Document:", f" {person}", " is a potter who was born in the town of", f" {town}", ".\n"


def _documents(names: Iterator[str]) -> Iterator[Strings]:
    """Documents about towns and persons in turns, without end."""
    while True:
        person, town, river, mayor, inn = islice(names, 5)
        yield _town(town, river, mayor, inn)
        yield _person(person, town)
