"""Retrieval tasks with the structure of RULER's (arXiv 2404.06654) and sentences of our own: needles in several forms,
variable tracking, the most frequent words of a list, questions about documents.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, pairwise, repeat
from typing import Any, Literal

import numpy as np

from tost_lm.tasks.grid import GridTask, section
from tost_lm.tasks.haystacks import (
    LONGEST_KEY,
    PAIRS,
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
from tost_lm.tasks.queries import Puzzle, PuzzleQueries, Queries, Query, QuerySource, RetrievalConfig, Strings
from tost_lm.tasks.task import Family


class RulerConfig(RetrievalConfig):
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


class Questions(PuzzleQueries):
    """Question answering from documents, tasks `qa_1@own-words` and `qa_2@own-words`: the structure of RULER's two
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

    chance, room = 1 / PAIRS, LONGEST_KEY + 1

    def __init__(self, name: str, source: QuerySource, hops: int):
        super().__init__(name, source)
        self.hops = hops

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


Counts = list[tuple[str, int]]
"""Distinct words, and how often each occurs."""


class WordList(Queries):
    """Base class. Every occurrence of every word has a drawn place. Sentences before the list fill the length.

        [EOT] Remember which words occur most often in the list at the end of this text.
        sentences … The list: WORD WORD WORD …
        Question: Which N words occur most often in the list?
        Answer: The words are → WORD, WORD … and WORD

    The answer has the most frequent word first, and of equally frequent ones the one that occurs first. In the control,
    the words of the answer do not occur.
    """

    question: str
    answers: int
    """Words in an answer."""

    def __init__(self, name: str, source: QuerySource):
        super().__init__(name, source)
        intro = "Remember which words occur most often in the list at the end of this text.\n"
        self._before, self._list, self._after = map(
            self.tokenizer.encode_array, (intro, "The list:", f"\nQuestion: {self.question}\nAnswer: The words are")
        )

    @abstractmethod
    def words(self, draws: np.random.Generator) -> Iterator[str]:
        """Distinct words, without end."""

    @abstractmethod
    def counts(self, words: Iterator[str], tokens: int) -> tuple[Counts, Counts]:
        """Counts of the answer's words, and of the others. All occurrences together have at most `tokens` tokens."""

    def query(self, length: int, depth: float | None, sample: int) -> tuple[Query, Query]:
        tokens = length - self._frame
        wanted, others = self.counts(self.words(self.draws(sample)), tokens)
        listing = self._listing(wanted + others, sample, length)
        first_place = {word: listing.index(word) for word, _ in wanted}
        answer = [word for word, _ in sorted(wanted, key=lambda one: (-one[1], first_place[one[0]]))]

        def make(listing: Sequence[str]) -> Query:
            ids = {word: self.tokenizer.encode(f" {word}") for word in set(listing)}
            words = np.fromiter(chain.from_iterable(ids[word] for word in listing), np.int64)
            noise = noise_haystack(self.tokenizer)(tokens - len(words))
            arrays = [[self.tokenizer.eot], self._before, noise, self._list, words, self._after]
            return Query(
                prompt=np.concatenate(arrays).astype(np.int64),
                question="Answer: The words are",
                references=tuple(answer),
                options=(tuple(chain.from_iterable(map(self.tokenizer.encode, listed(answer)))),),
                right=0,
            )

        return make(listing), make(self._listing(others, sample, length))

    def _listing(self, counts: Counts, sample: int, length: int) -> list[str]:
        """Every occurrence, in a drawn order."""
        places = np.repeat(np.arange(len(counts)), [times for _, times in counts])
        return [counts[place][0] for place in self.draws(sample, length).permutation(places).tolist()]

    @property
    def _frame(self) -> int:
        """Tokens besides the list and the sentences before it."""
        return 1 + len(self._before) + len(self._list) + len(self._after) + self.room

    def _tokens(self, words: Sequence[str]) -> np.ndarray:
        """Tokens of each word in the list."""
        return np.array([len(self.tokenizer.encode(f" {word}")) for word in words])


COMMON_TIMES, OTHER_TIMES = 30, 3


class CommonWords(WordList):
    """Common words, task `cwe@own-words`: RULER's structure (arXiv 2404.06654) with words of our own.

    Ten words occur 30 times each, and as many others as fit 3 times each. So a longer list has more other words.
    """

    question = "Which ten words occur most often in the list?"
    answers, room, chance = 10, _room(10, LONGEST_KEY), 10 / PAIRS

    def needed(self, samples: int) -> int:
        lists = (list(islice(self.words(self.draws(sample)), self.answers)) for sample in range(samples))
        return self._frame + COMMON_TIMES * max(int(self._tokens(words).sum()) for words in lists)

    def words(self, draws: np.random.Generator) -> Iterator[str]:
        return word_keys(draws)

    def counts(self, words: Iterator[str], tokens: int) -> tuple[Counts, Counts]:
        found: Counts = []
        for word, times in zip(words, chain(repeat(COMMON_TIMES, self.answers), repeat(OTHER_TIMES)), strict=False):
            tokens -= times * int(self._tokens([word])[0])
            if tokens < 0:
                break
            found.append((word, times))
        return found[: self.answers], found[self.answers :]


NOISE_WORD, WORD_LETTERS = "...", 6
SHORTEST_LIST = 100
"""Words of the shortest list. From here on, each of the first five occurs more often than the next."""


class FrequentWords(WordList):
    """Frequent words, task `fwe@own-words`: RULER's structure (arXiv 2404.06654).

    Words are six drawn letters. The k-th occurs n / (k² · ζ(2)) times in a list of about n words, as in RULER, with
    ζ(2) = π² / 6. The first is `...`, and the answer names the next three.
    """

    question = "Which three words, besides the dots, occur most often in the list?"
    answers, room, chance = 3, _room(3, WORD_LETTERS), 3 / 26**WORD_LETTERS

    def needed(self, samples: int) -> int:
        return self._frame + max(self._cost(self._first_words(sample), SHORTEST_LIST) for sample in range(samples))

    def words(self, draws: np.random.Generator) -> Iterator[str]:
        return chain([NOISE_WORD], variables(draws, WORD_LETTERS))

    def counts(self, words: Iterator[str], tokens: int) -> tuple[Counts, Counts]:
        drawn = list(islice(words, len(_zipf(tokens))))
        low, high = SHORTEST_LIST, tokens + 1  # bisection: a list of `low` words fits, one of `high` does not
        costs = self._tokens(drawn)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._cost(costs, middle) <= tokens else (low, middle)
        counts = list(zip(drawn, _zipf(low), strict=False))
        return counts[1 : 1 + self.answers], [counts[0], *counts[1 + self.answers :]]

    def _first_words(self, sample: int) -> np.ndarray:
        return self._tokens(list(islice(self.words(self.draws(sample)), len(_zipf(SHORTEST_LIST)))))

    @staticmethod
    def _cost(tokens: np.ndarray, words: int) -> int:
        counts = _zipf(words)
        return int(np.dot(tokens[: len(counts)], counts))


def _zipf(words: int) -> list[int]:
    """How often the k-th word of a list of about `words` words occurs; all that occur at all."""
    ranks = np.arange(1, int((words * 6 / np.pi**2) ** 0.5) + 1)
    return (words * 6 / np.pi**2 / ranks**2).astype(int).tolist()


def _task(name: str, about: str, make: Callable[..., Queries], **options: Any) -> GridTask:
    return GridTask(f"{name}@own-words", about, partial(make, **options))


def _niah(name: str, about: str, form: Form) -> GridTask:
    return _task(f"niah_{name}", about, NiahQueries, form=form)


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
        _task("vt", "a chain of five variables; the question asks for those with a value", VariableTracking),
        _task("cwe", "a list of words; the question asks for the ten most common ones", CommonWords),
        _task("fwe", "a list of drawn letters; the question asks for the three most frequent words", FrequentWords),
        _task("qa_1", "documents about towns; one of them answers the question", Questions, hops=1),
        _task("qa_2", "documents about towns and persons; two of them answer the question", Questions, hops=2),
    ],
    RulerConfig,
    section,
)
