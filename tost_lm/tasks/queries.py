"""Queries: texts of an exact length, and questions about what stands in them and about what does not."""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from pydantic import AfterValidator, Field, PositiveInt

from tost_lm.config import Section
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import ConfigError
from tost_lm.inference.effective_length import RULER_THRESHOLD
from tost_lm.tasks.haystacks import Text, insert_needles, records_haystack, text_haystack

if TYPE_CHECKING:
    from tost_lm.inference.generation import ModelFacts


@dataclass(frozen=True)
class Question:
    """A question after a text, and its answer."""

    ids: np.ndarray
    """Int64 [Q]; the answer follows them."""
    shown: str
    """Its text."""
    references: tuple[str, ...]
    """Strings that the answer must contain."""
    options: tuple[tuple[int, ...], ...] = ()
    """Ids of the answers that are compared; a task without a comparison has none."""
    right: int = 0
    """Index of the right option."""
    depth: float | None = None
    """Where in the text its answer stands, or, of a control, would stand; None: the task has no depths."""


@dataclass(frozen=True)
class AskedText:
    """A text, which is read once, and the questions that follow it, each on its own."""

    context: np.ndarray
    """Ids, int64 [T]."""
    questions: tuple[Question, ...]
    controls: tuple[Question, ...] = ()
    """Questions about what does not stand in the text."""

    @property
    def asked(self) -> tuple[Question, ...]:
        """All questions."""
        return self.questions + self.controls

    @property
    def shape(self) -> tuple[int, ...]:
        """Tokens of the text and of each question; texts of one shape are read together."""
        return len(self.context), *(len(question.ids) for question in self.asked)


IN_ORDER = AfterValidator(lambda numbers: sorted(set(numbers)))
"""Of numbers in a setting: ascending, each once."""
MOST_KEYS = 8


class GridConfig(Section):
    """Settings of tasks that have lengths."""

    lengths: Annotated[list[PositiveInt], IN_ORDER] = Field(default_factory=list)
    """Tokens of text, question and answer together; empty: a quarter, half and all of model.context_length."""
    samples: int = Field(default=8, gt=0)
    """Texts of each length."""
    threshold: float = Field(default=RULER_THRESHOLD, gt=0, le=1)
    """The effective length is the longest one with at least this mean score; default: RULER's."""


class KeysConfig(GridConfig):
    """Settings of tasks that hide values of keys."""

    depths: Annotated[list[Annotated[float, Field(ge=0, le=1)]], IN_ORDER] = Field(
        default=[0.0, 0.25, 0.5, 0.75, 1.0], min_length=1, max_length=MOST_KEYS
    )
    """Positions in the text, from 0 (beginning) to 1 (end); a key stands at each of them and is asked for."""
    keys: int = Field(default=4, ge=1, le=MOST_KEYS)
    """Keys in a text, at least one for each depth; others stand at drawn depths."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the texts, keys and values."""


class HaystackConfig(KeysConfig):
    """Settings of tasks whose haystack is a text."""

    haystack: Path | None = None
    """A UTF-8 file for haystacks; default: the held-out documents, or Python's documentation if there are none."""


class QuerySource(NamedTuple):
    """What queries are made from."""

    section: str
    """Name of the settings, for errors."""
    settings: Any
    """A GridConfig."""
    tokenizer: Tokenizer
    find_text: Callable[[], Text]
    """Finds the text of haystacks."""


class Queries(ABC):
    """Makes the texts and questions of one task for one tokenizer.

    A text depends only on the settings, the tokenizer, the haystack, its length and its number. It does not depend on
    other lengths or on the number of texts.

    Attributes:
        name: of the task.
        chance: expected score of a guess of the right form: among the values in the text if it has several, else
            without the text.
        room: tokens left for the answer.
        needed: maximum of the tokens besides the haystack, with `room`.
        text: source of the haystacks; None: they are generated.
    """

    chance: float
    room: int
    needed: int
    text: Text | None = None

    def __init__(self, name: str, source: QuerySource):
        """Raises TostError if there is no text for them."""
        self.name, self.tokenizer, self.settings, self.section = name, source.tokenizer, source.settings, source.section

    @abstractmethod
    def asked(self, length: int, sample: int) -> AskedText:
        """A text with its questions. It has `length` − `room` tokens with each of them, and `length` must be greater
        than `needed`.

        Raises:
            DataError: `text` is shorter than the length.
        """

    def lengths(self, model: "ModelFacts") -> list[int]:
        """The lengths that are measured: those given, else what fits of a quarter, half and all of the context length.

        Raises:
            ConfigError: a length exceeds the limit, or is too short for needles, question and answer.
            DataError: the haystack's text is shorter than a length.
        """
        settings, limit, context = self.settings, model.position_limit, model.context_length
        quarters = [context // 4, context // 2, context]
        chosen = settings.lengths or [length for length in quarters if length > self.needed] or quarters[-1:]
        for length in chosen:
            if limit is not None and length > limit:
                raise ConfigError(f"{self.section}.lengths: {length} exceeds the model's positions ({limit}); lower it")
            if length <= self.needed:
                raise ConfigError(
                    f"{self.section}.lengths: {length} tokens are too few for {self.name}, whose texts without a "
                    f"haystack take {self.needed}; raise it"
                )
            if self.text:
                self.text.for_length(length)
        return chosen

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that the results depend on."""
        return self.settings.model_dump(mode="json", exclude={"haystack"})


class Form(NamedTuple):
    """The definition of a task that hides values of keys: at least 2 × MOST_KEYS keys and values."""

    keys: Sequence[str]
    values: Sequence[str]
    needle: Callable[[str, str], tuple[str, ...]]
    """(key, value) → the sentence that states the value, as strings that are encoded separately: so a value has the
    same ids everywhere."""
    question: Callable[[str], str]
    """Of a key; the value follows it after a space."""
    of_records: bool = False
    """Whether the haystack consists of needles with other keys and numbers, instead of a text."""


class KeyedQueries(Queries):
    """Texts that state values of several keys. The text is read once, and each question continues from there.

        [EOT] haystack … NEEDLE … haystack … NEEDLE … haystack ⏎ QUESTION → VALUE

    The haystack is text in a fixed order. At each depth of the settings stands the needle of a key, moved back to the
    end of a line or sentence; with fewer depths than keys, more needles stand at drawn ones. Each key of a depth is
    asked for. The control asks for as many keys that are not in the text, whose values are not in it either. Beside the
    scores of all tasks, `choice` is whether the right value is the most likely (by the total log-probability of its
    tokens) of those in the text and one other, which is the right one in the control. The chance is that of a guess
    among the values in the text. A text with any question and the room for the longest value has exactly the length in
    tokens: line ends before shorter questions fill them.
    """

    def __init__(self, name: str, source: QuerySource, form: Form):
        super().__init__(name, source)
        self.form, self.text = form, None if form.of_records else source.find_text()
        self.keys = max(self.settings.keys, len(self.settings.depths))
        self.chance = 1 / self.keys
        self.options = {value: tuple(self.tokenizer.encode(f" {value}")) for value in form.values}
        self.room = max(map(len, self.options.values()))
        self.line_end = self.tokenizer.encode("\n")
        self.questions = {key: [*self.line_end, *self.tokenizer.encode(form.question(key))] for key in form.keys}
        self.question_tokens = max(map(len, self.questions.values()))
        longest = max(len(self._needle(*pair)) for pair in product(form.keys, form.values))
        self.needed = 1 + self.keys * longest + self.question_tokens + self.room

    def asked(self, length: int, sample: int) -> AskedText:
        draws = np.random.default_rng((self.settings.seed, zlib.crc32(self.name.encode()), length, sample))
        keys, values = (
            [of[int(n)] for n in draws.permutation(len(of))[: 2 * self.keys]]
            for of in (self.form.keys, self.form.values)
        )
        depths: list[float] = [*self.settings.depths, *draws.random(self.keys - len(self.settings.depths))]
        needles = list(map(self._needle, keys, values))
        places = sorted(range(self.keys), key=depths.__getitem__)
        tokens = length - self.room - self.question_tokens - 1 - sum(map(len, needles[: self.keys]))
        if self.text:
            haystack = text_haystack(self.text, length, tokens, draws)
        else:
            haystack = records_haystack(self._needle, tokens, draws, {*self.form.keys, *self.form.values})
        text = insert_needles(self.tokenizer, haystack, [needles[n] for n in places], [depths[n] for n in places])
        context = np.concatenate([[self.tokenizer.eot], text])

        own, other = [], []
        for n, depth in enumerate(self.settings.depths):
            compared = [*values[: self.keys], values[self.keys + n]]
            own.append(self._question(keys[n], compared, n, depth))
            other.append(self._question(keys[self.keys + n], compared, self.keys, depth))
        return AskedText(context, tuple(own), tuple(other))

    def _needle(self, key: str, value: str) -> list[int]:
        return list(chain.from_iterable(map(self.tokenizer.encode, self.form.needle(key, value))))

    def _question(self, key: str, compared: Sequence[str], right: int, depth: float) -> Question:
        ids, options = self.questions[key], tuple(self.options[value] for value in compared)
        filled = np.array([*self.line_end[-1:] * (self.question_tokens - len(ids)), *ids], np.int64)
        return Question(filled, self.form.question(key), (compared[right],), options, right, depth)
