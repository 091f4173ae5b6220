"""Use of the context: copying, gain per token and many-shot mapping, each with controls.

Copying of a repeated passage, task `copying@text`.

    repeated   [EOT] passage · text between · cue → rest of the passage
    control    [EOT] another passage · text between · cue → rest of the passage
    first      [EOT] cue → rest of the passage

The cue is the first 8 tokens of the passage. The same tokens are scored under each condition, at the second occurrence,
after another passage of the same size, and at the first occurrence. Passages and the text between are neighbours in the
text, so the control has the same subject.

Gain per token from context, task `context_gain@text`.

    whole     [EOT] first half · second half
    control   [EOT] as many tokens of another document · second half
    cut       [EOT] second half

The last tokens of the second half are scored, the same ones under each condition. The halves are from one document. The
gain over the control is what the tokens farther away than half of the length are worth. The gain over `cut` also has
what the length alone does to the model: one that was trained at one length may predict badly at another.

Many-shot mapping of words to labels, tasks `many_shot_seen@own-words` and `many_shot_unseen@own-words`.

    Each line has a word and the label of its kind.
    falcon C
    hammer A
    …
    heron → C

There are eight kinds of words and eight labels. Each example permutes the labels, so the mapping must be read from its
shots. The kinds are equally frequent. In `seen`, the word of the question is in the shots; in `unseen` it is not, so
the model must know which words are of one kind. The answer is the likeliest of the eight labels; chance is 1/8. The
labels of the control's shots are drawn independently of the words.

The number of shots is fixed for the cells of a length. Repeated sentences before the text make all prompts of a cell
equally long: as if each shot had the tokens of the longest.
"""

from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field, PositiveInt

from tost_lm.errors import ConfigError, DataError
from tost_lm.tasks.grid import GridConfig, GridTask, section
from tost_lm.tasks.haystacks import noise_haystack
from tost_lm.tasks.queries import IN_ORDER, Queries, Query, QuerySource
from tost_lm.tasks.task import Family

if TYPE_CHECKING:
    from tost_lm.inference.generation import ModelFacts

LABELS = 8


class ContextConfig(GridConfig):
    """Tasks about the use of the context."""

    section = "context"
    lengths: Annotated[list[PositiveInt], IN_ORDER] = Field(default_factory=list)
    """Tokens of context and scored tokens together in copying and context_gain; empty: a quarter, half and all of model.context_length."""
    target_tokens: int = Field(default=32, gt=0)
    """Tokens that are scored in an example of copying and context_gain."""
    shots: Annotated[list[Annotated[int, Field(ge=LABELS)]], IN_ORDER] = Field(default_factory=list)
    """Labelled words before the question of many_shot, at least 8; empty: 8, 16, … up to 4,096 as far as they fit model.context_length."""
    samples: int = Field(default=32, gt=0)
    """Examples per cell."""
    haystack: Path | None = None
    """A UTF-8 file with one long document for copying and context_gain; default: the held-out documents, or Python's documentation if there are none."""


CUE_TOKENS = 8


class TextQueries(Queries):
    """Base class of those whose targets are tokens of a text."""

    def __init__(self, name: str, source: QuerySource):
        super().__init__(name, source)
        self.text, self.room = source.find_text(), source.settings.target_tokens
        self.chance = 1 / self.tokenizer.vocab_size
        self.passage_tokens = CUE_TOKENS + self.room

    def identity(self, settings: Any) -> dict[str, Any]:
        return super().identity(settings) | {"target_tokens": self.room}


class Copying(TextQueries):
    """The cells of a length have a fixed distance between the occurrences."""

    conditions = ("repeated", "control", "first")

    def needed(self, samples: int) -> int:
        return 2 * self.passage_tokens

    def facts(self, length: int) -> dict[str, int]:
        """The distance of a scored token from its first occurrence."""
        return {"distance": length - 1 - self.passage_tokens}

    def query(self, length: int, depth: float | None, sample: int) -> tuple[Query, ...]:
        assert self.text is not None
        source, size = self.text.for_length(length), length - 1 - self.passage_tokens
        draws = self.draws(length, sample)
        start = int(draws.integers(len(source) - size - self.passage_tokens + 1))
        passage, other, between = np.split(
            source[start : start + size + self.passage_tokens], [self.passage_tokens, 2 * self.passage_tokens]
        )
        cue, target = passage[:CUE_TOKENS], tuple(passage[CUE_TOKENS:].tolist())

        def make(*before: np.ndarray) -> Query:
            return Query(np.concatenate([[self.tokenizer.eot], *before, cue]), "", (), (target,), 0)

        return make(passage, between), make(other, between), make()


class ContextGain(TextQueries):
    """The cells of a length show the gain from one range of distances."""

    conditions = ("whole", "control", "cut")

    def lengths(self, settings: Any, model: "ModelFacts") -> list[int]:
        """Lengths as in `Queries.lengths`; by default without lengths for which the text has no two documents.

        Raises:
            ConfigError, DataError: as there, and if the text has no two documents of a given length, or of any.
        """
        lengths = super().lengths(settings, model)
        for i, length in enumerate(lengths):
            assert self.text is not None
            try:
                self.text.documents(length)
            except DataError:
                if settings.lengths or i == 0:
                    raise
                return lengths[:i]
        return lengths

    def needed(self, samples: int) -> int:
        return 2 * self.room + 2

    def facts(self, length: int) -> dict[str, int]:
        """The number of first tokens that `cut` lacks and the control replaces."""
        return {"removed": length // 2}

    def query(self, length: int, depth: float | None, sample: int) -> tuple[Query, ...]:
        assert self.text is not None
        documents, removed = self.text.documents(length), length // 2
        draws = self.draws(length, sample)
        own, other = (documents[i] for i in draws.choice(len(documents), 2, replace=False))
        start, elsewhere = (int(draws.integers(len(x) - n + 1)) for x, n in ((own, length - 1), (other, removed)))
        window, target_start = own[start : start + length - 1], length - 1 - self.room
        context, target = window[:target_start], tuple(window[target_start:].tolist())

        def make(first: np.ndarray) -> Query:
            return Query(np.concatenate([[self.tokenizer.eot], first, context[removed:]]), "", (), (target,), 0)

        return make(context[:removed]), make(other[elsewhere : elsewhere + removed]), make(context[:0])


KINDS = tuple(
    tuple(line.split())
    for line in (
        "falcon heron eagle crow swan duck goose owl robin pigeon parrot hawk",
        "hammer saw drill chisel wrench pliers axe file shovel rake needle knife",
        "apple pear plum cherry peach lemon grape mango orange banana melon fig",
        "red blue green yellow purple brown black white pink grey violet crimson",
        "doctor teacher baker farmer lawyer sailor painter nurse cook judge pilot tailor",
        "car train bus ship truck bicycle plane boat tram wagon ferry taxi",
        "shirt coat hat shoe sock glove scarf dress jacket belt skirt boot",
        "guitar piano violin flute drum trumpet harp cello organ banjo clarinet oboe",
    )
)
NAMES = tuple("ABCDEFGH")
SHOTS_INTRO = "Each line has a word and the label of its kind.\n"
assert len(KINDS) == len(NAMES) == LABELS


SHOTS = tuple(2**n for n in range(3, 13))
"""Default numbers of shots."""


class ManyShot(Queries):
    """One of the two tasks. A number of shots fits a length that has `frame` tokens besides them, with the end of text
    and room for the answer, and `longest` tokens for each shot."""

    chance, conditions = 1 / LABELS, ("mapping", "control")

    def __init__(self, name: str, source: QuerySource, is_seen: bool):
        super().__init__(name, source)
        self.is_seen, self.encode = is_seen, cache(self.tokenizer.encode)
        self._noise = noise_haystack(self.tokenizer)
        self.labels = tuple(tuple(self.encode(f" {name}")) for name in NAMES)
        self.room = max(map(len, self.labels))
        longest = max(len(self.encode(word)) for words in KINDS for word in words)
        self.frame = 1 + len(self.encode(SHOTS_INTRO)) + longest + self.room
        self.longest = longest + self.room + len(self.encode("\n"))

    def lengths(self, settings: Any, model: "ModelFacts") -> list[int]:
        """The lengths of the cells: for the shots given, else for the default numbers that fit the context length.

        Raises:
            ConfigError: a length exceeds the model's positions.
        """
        fitting = [shots for shots in SHOTS if self._length(shots) <= model.context_length]
        chosen = settings.shots or fitting or SHOTS[:1]
        limit = model.position_limit
        for shots in chosen:
            if limit is not None and self._length(shots) > limit:
                raise ConfigError(
                    f"context.shots: {shots} take {self._length(shots):,} tokens in {self.name}, more than "
                    f"the model's positions ({limit:,}); lower it, or leave the task out"
                )
        return [self._length(shots) for shots in chosen]

    def identity(self, settings: Any) -> dict[str, Any]:
        return super().identity(settings) | {"lengths": settings.shots}

    def needed(self, samples: int) -> int:
        return self.frame

    def facts(self, length: int) -> dict[str, int]:
        return {"shots": (length - self.frame) // self.longest}

    def query(self, length: int, depth: float | None, sample: int) -> tuple[Query, ...]:
        count = self.facts(length)["shots"]
        draws = self.draws(count, sample)
        kinds = draws.permutation(np.resize(draws.permutation(LABELS), count))
        asked = int(draws.integers(LABELS))
        new = int(draws.integers(len(KINDS[asked])))
        words = [self._draw(int(kind), new if kind == asked else None, draws) for kind in kinds]
        of_kind = [word for kind, word in zip(kinds, words, strict=True) if kind == asked]
        question = of_kind[int(draws.integers(len(of_kind)))] if self.is_seen else KINDS[asked][new]
        label_of_kind = draws.permutation(LABELS)
        right = int(label_of_kind[asked])

        def make(labels: np.ndarray) -> Query:
            shots = [x for word, label in zip(words, labels, strict=True) for x in (word, f" {NAMES[label]}", "\n")]
            # Encoded separately, so that a label has the same ids everywhere.
            text = list(chain.from_iterable(map(self.encode, [SHOTS_INTRO, *shots, question])))
            noise = self._noise(length - self.room - 1 - len(text))
            prompt = np.concatenate([[self.tokenizer.eot], noise, text]).astype(np.int64)
            return Query(prompt, question, (), self.labels, right)

        return make(label_of_kind[kinds]), make(draws.integers(LABELS, size=count))

    def _draw(self, kind: int, left_out: int | None, draws: np.random.Generator) -> str:
        """A word of a kind, without the one with the index `left_out`."""
        words = KINDS[kind] if left_out is None else KINDS[kind][:left_out] + KINDS[kind][left_out + 1 :]
        return words[int(draws.integers(len(words)))]

    def _length(self, shots: int) -> int:
        return self.frame + shots * self.longest


TASKS = [
    GridTask(
        "copying@text",
        "a passage and its repetition, by distance; control: another passage",
        Copying,
        "token_accuracy",
    ),
    GridTask(
        "context_gain@text",
        "the same tokens with and without the first half of the length; control: another text",
        ContextGain,
        "token_accuracy",
    ),
    GridTask(
        "many_shot_seen@own-words",
        "words and permuted labels, 8 to 4,096 shots; the word of the question is in the shots",
        partial(ManyShot, is_seen=True),
        "choice_accuracy",
    ),
    GridTask(
        "many_shot_unseen@own-words",
        "the same with another word of a kind in the shots; control of both: random labels",
        partial(ManyShot, is_seen=False),
        "choice_accuracy",
    ),
]
FAMILY = Family("context", TASKS, ContextConfig, section)
