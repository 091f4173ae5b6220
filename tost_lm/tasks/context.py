"""Use of the context: copying, gain per token, many-shot mapping and answers from passages, each with controls.

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

Answers from passages, task `passages@own-words`: one of k passages has the answer.

    Read the passages and answer the question.
    Passage: Clara Weaver was born in Rome. At school, Clara was best in music. … later worked as a baker in Paris.
    …
    Question: In which city was Clara Weaver born?
    Answer: Clara Weaver was born in → Rome

Sentences, people and facts are our own. Each passage is about another person with other facts, drawn independently, so
the answer needs the right passage and the right sentence. Its place is drawn. The control has a passage about one more
person instead. Two scores: the likeliest of ten answers (chance 10 %), and the answer in the greedily generated text.

Tasks whose cells have a number of shots or passages. The length of a cell follows from it.

Repeated sentences before the text make all prompts of a cell equally long: as if each shot or passage had the tokens of
the longest.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field, PositiveInt, field_validator

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import ConfigError, DataError
from tost_lm.markdown import escape, format_chance, table, with_error
from tost_lm.page import Chart, Page, new_figure, position_axis
from tost_lm.tasks.grid import GridConfig, GridTask, Source
from tost_lm.tasks.haystacks import Text, noise_haystack
from tost_lm.tasks.queries import Queries, Query
from tost_lm.tasks.sections import EvaluatedModel, checkpoint_line
from tost_lm.tasks.task import Family

if TYPE_CHECKING:
    from tost_lm.inference.generation import ModelFacts

LABELS = 8
MAX_PASSAGES = 1000


class ContextConfig(GridConfig):
    """Tasks about the use of the context."""

    section = "context"
    lengths: list[PositiveInt] = Field(default_factory=list)
    """Tokens of context and scored tokens together in copying and context_gain; empty: a quarter, half and all of model.context_length."""
    target_tokens: int = Field(default=32, gt=0)
    """Tokens that are scored in an example of copying and context_gain."""
    shots: list[PositiveInt] = Field(default_factory=list)
    """Labelled words before the question of many_shot, at least 8; empty: 8, 16, … up to 4,096 as far as they fit model.context_length."""
    passages: list[PositiveInt] = Field(default_factory=list)
    """Passages before the question, at most 1,000; empty: 1, 2, 4, … as far as they fit model.context_length."""
    samples: int = Field(default=32, gt=0)
    """Examples per cell."""
    haystack: Path | None = None
    """A UTF-8 file with one long document for copying and context_gain; default: the held-out documents, or Python's documentation if there are none."""

    @field_validator("lengths", "shots", "passages")
    @classmethod
    def _in_order(cls, numbers: list[int]) -> list[int]:
        return sorted(set(numbers))

    @field_validator("shots")
    @classmethod
    def _check_shots(cls, shots: list[int]) -> list[int]:
        if shots and min(shots) < LABELS:
            raise ValueError(f"context.shots: {min(shots)} is less than the {LABELS} labels; raise it")
        return shots

    @field_validator("passages")
    @classmethod
    def _check_passages(cls, passages: list[int]) -> list[int]:
        if passages and max(passages) > MAX_PASSAGES:
            raise ValueError(f"context.passages: {max(passages)} is more than {MAX_PASSAGES}; lower it")
        return passages


class CountedQueries(Queries):
    """Base class; a subclass defines its texts.

    Attributes:
        counted: what is counted, a key of `facts`.
        counts: the default counts, ascending.
        frame: maximum number of tokens besides those that are counted, with the end of text and room for the answer.
        longest: maximum number of tokens of a shot or passage.
    """

    counted: str
    counts: Sequence[int]
    frame: int
    longest: int

    def __init__(self, name: str, seed: int, tokenizer: Tokenizer):
        self.name, self.seed, self.tokenizer = name, seed, tokenizer
        self.encode = cache(tokenizer.encode)
        self._noise = noise_haystack(tokenizer)

    @abstractmethod
    def texts(self, count: int, draws: np.random.Generator) -> tuple[Query, ...]:
        """An example under each condition, without an end of text and repeated sentences before it."""

    def lengths(self, settings: Any, model: "ModelFacts") -> list[int]:
        """The lengths of the cells: for the counts given, else for the default counts that fit the model's positions.

        Raises:
            ConfigError: a length exceeds the model's positions.
        """
        fitting = [count for count in self.counts if self._length(count) <= model.context_length]
        chosen = getattr(settings, self.counted) or fitting or self.counts[:1]
        limit = model.position_limit
        for count in chosen:
            if limit is not None and self._length(count) > limit:
                raise ConfigError(
                    f"context.{self.counted}: {count} take {self._length(count):,} tokens in {self.name}, more than "
                    f"the model's positions ({limit:,}); lower it, or leave the task out"
                )
        return [self._length(count) for count in chosen]

    def identity(self, settings: Any) -> dict[str, Any]:
        return super().identity(settings) | {"lengths": getattr(settings, self.counted)}

    def needed(self, samples: int) -> int:
        return self.frame

    def facts(self, length: int) -> dict[str, int]:
        return {self.counted: (length - self.frame) // self.longest}

    def query(self, length: int, depth: float | None, sample: int) -> tuple[Query, ...]:
        count = self.facts(length)[self.counted]
        draws = self.draws(count, sample)

        def fill(text: Query) -> Query:
            noise = self._noise(length - self.room - 1 - len(text.prompt))
            return replace(text, prompt=np.concatenate([[self.tokenizer.eot], noise, text.prompt]).astype(np.int64))

        return tuple(map(fill, self.texts(count, draws)))

    def join(self, strings: Sequence[str]) -> np.ndarray:
        """Ids of strings that are encoded separately, so that a value has the same ids everywhere: int64."""
        return np.array(list(chain.from_iterable(map(self.encode, strings))), np.int64)

    def _length(self, count: int) -> int:
        return self.frame + count * self.longest


CUE_TOKENS = 8


class TextQueries(Queries):
    """Base class of those whose targets are tokens of a text."""

    def __init__(self, name: str, seed: int, tokenizer: Tokenizer, text: Text, target_tokens: int):
        self.name, self.seed, self.eot, self.text, self.room = name, seed, tokenizer.eot, text, target_tokens
        self.chance = 1 / tokenizer.vocab_size
        self.passage_tokens = CUE_TOKENS + target_tokens

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
            return Query(np.concatenate([[self.eot], *before, cue]), "", (), (target,), 0)

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
        for i, length in enumerate(sorted(lengths)):
            assert self.text is not None
            try:
                self.text.documents(length)
            except DataError:
                if settings.lengths or i == 0:
                    raise
                return sorted(lengths)[:i]
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
            return Query(np.concatenate([[self.eot], first, context[removed:]]), "", (), (target,), 0)

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


class ManyShot(CountedQueries):
    """One of the two tasks."""

    chance, conditions = 1 / LABELS, ("mapping", "control")
    counted, counts = "shots", tuple(2**n for n in range(3, 13))

    def __init__(self, name: str, seed: int, tokenizer: Tokenizer, is_seen: bool):
        super().__init__(name, seed, tokenizer)
        self.is_seen = is_seen
        self.labels = tuple(tuple(self.encode(f" {name}")) for name in NAMES)
        self.room = max(map(len, self.labels))
        longest = max(len(self.encode(word)) for words in KINDS for word in words)
        self.frame = 1 + len(self.encode(SHOTS_INTRO)) + longest + self.room
        self.longest = longest + self.room + len(self.encode("\n"))

    def texts(self, count: int, draws: np.random.Generator) -> tuple[Query, ...]:
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
            return Query(self.join([SHOTS_INTRO, *shots, question]), question, (), self.labels, right)

        return make(label_of_kind[kinds]), make(draws.integers(LABELS, size=count))

    def _draw(self, kind: int, left_out: int | None, draws: np.random.Generator) -> str:
        """A word of a kind, without the one with the index `left_out`."""
        words = KINDS[kind] if left_out is None else KINDS[kind][:left_out] + KINDS[kind][left_out + 1 :]
        return words[int(draws.integers(len(words)))]


_FIRST = """
    Anna Ben Clara David Emma Frank Grace Henry Iris Jack Karen Leo Maria Nora Oscar Paul Queenie Rosa Simon Tina Ursula
    Victor Wendy Xavier Yvonne Zoe Albert Bella Carl Diana Eric Fiona
"""
_LAST = """
    Weaver Miller Stone Brook Field Wood Hill Marsh Fisher Mason Cooper Potter Carter Turner Porter Walker Archer Hunter
    Baxter Dyer Fowler Glover Harper Keeler Lister Naylor Palmer Sawyer Tanner Webster Wright Young
"""
CITIES = ("Rome", "Paris", "London", "Berlin", "Madrid", "Vienna", "Dublin", "Boston", "Moscow", "Tokyo")
SUBJECTS = ("music", "history", "science", "art", "math", "English", "French", "drama", "sports", "biology")
JOBS = ("baker", "doctor", "teacher", "farmer", "lawyer", "driver", "writer", "painter", "nurse", "cook")
VALUES = CITIES, SUBJECTS, JOBS
"""Ten of each kind."""
PEOPLE = tuple(product(_FIRST.split(), _LAST.split()))
FACTS_INTRO = "Read the passages and answer the question.\n"
assert len(PEOPLE) > MAX_PASSAGES


class Passages(CountedQueries):
    """The cells of a length have a fixed number of passages."""

    chance = 1 / len(CITIES)
    conditions, counted, counts = ("passage", "control"), "passages", tuple(2**n for n in range(10))

    def __init__(self, name: str, seed: int, tokenizer: Tokenizer):
        super().__init__(name, seed, tokenizer)
        self.options = tuple(tuple(tuple(self.encode(f" {value}")) for value in kind) for kind in VALUES)
        self.room = max(len(ids) for options in self.options for ids in options)
        widest = [max(range(len(options)), key=lambda i, o=options: len(o[i])) for options in self.options]
        self.longest = max(len(self.join(_passage(*person, (*widest, widest[0])))) for person in PEOPLE)
        questions = (_question(*person, asked) for person in PEOPLE for asked in range(len(VALUES)))
        self.frame = (
            1 + len(self.encode(FACTS_INTRO)) + max(len(self.join(strings)) for strings in questions) + self.room
        )

    def texts(self, count: int, draws: np.random.Generator) -> tuple[Query, ...]:
        chosen = [PEOPLE[int(i)] for i in draws.choice(len(PEOPLE), count + 1, replace=False)]
        facts = draws.integers(len(CITIES), size=(count + 1, 4))
        texts = [_passage(*person, own) for person, own in zip(chosen, facts, strict=True)]
        about, asked = int(draws.integers(count)), int(draws.integers(len(VALUES)))
        question, right = _question(*chosen[about], asked), int(facts[about, asked])

        def make(shown: Sequence[Sequence[str]]) -> Query:
            prompt = self.join([FACTS_INTRO, *chain.from_iterable(shown), *question])
            return Query(prompt, "".join(question), (VALUES[asked][right],), self.options[asked], right)

        return make(texts[:count]), make([*texts[:about], texts[count], *texts[about + 1 : count]])


def _passage(first: str, last: str, facts: Sequence[int]) -> tuple[str, ...]:
    city, subject, job, elsewhere = facts
    return (
        "Passage:", f" {first} {last}", " was born in", f" {CITIES[city]}",
        ". At school,", f" {first}", " was best in", f" {SUBJECTS[subject]}",
        " and often stayed late. Years later,", f" {first}", " found work as a", f" {JOBS[job]}",
        " and moved to a small house in", f" {CITIES[elsewhere]}", ".\n",
    )  # fmt: skip


def _question(first: str, last: str, asked: int) -> tuple[str, ...]:
    """A question and the beginning of its answer."""
    name = f" {first} {last}"
    return (
        ("Question: In which city was", name, " born?\n", "Answer:", name, " was born in"),
        ("Question: In which subject was", name, " best at school?\n", "Answer: At school,", name, " was best in"),
        ("Question: As what did", name, " find work?\n", "Answer:", name, " found work as a"),
    )[asked]


COLUMNS = {
    "choice_accuracy": "choice",
    "found_share": "found",
    "token_accuracy": "tokens",
    "nats_per_token": "nats per token",
}


def section(run: EvaluatedModel, page: Page) -> str:
    """Copying, gain per token, many-shot mapping and answers from passages; empty without results."""
    found = {task: results for task in TASKS if (results := run.results(task.name))}
    if not found:
        return ""
    paragraphs = [
        "## Use of context",
        page.add_figure(
            "context",
            gain_chart(found),
            "Gain per token from context by length",
        ),
        "Gain: nats per token by which the useful context lowers the answer, against the control in the figure. ± is "
        "the standard error over the examples, for gains of paired differences. Parentheses have the control. Tokens: "
        "fraction of answer tokens that are the most likely ones. Choice: the right answer is the likeliest of all. "
        "Found: it is in the greedily generated text. The figure's CSV file has these scores.",
    ]
    for task, results in found.items():
        chance, command = format_chance(results["chance"]), run.command(task.name)
        paragraphs += [f"### {escape(task.name)} (chance {chance})", checkpoint_line(run, results, command)]
        paragraphs.append(_table(task, results["cells"]))
    return "\n\n".join(paragraphs)


def gain_chart(found: Mapping[GridTask, dict[str, Any]]) -> Chart:
    """The gain from the useful context by length, a line for each task; rows have the scores of all cells."""
    figure, axes = new_figure(7, 3.6)
    rows = []
    for task, results in found.items():
        name, cells, key = task.name, results["cells"], "gain_over_control"
        lengths, gains = [cell["length"] for cell in cells], [cell[key] for cell in cells]
        errors = [cell[f"{key}_standard_error"] or 0 for cell in cells]
        axes.errorbar(lengths, gains, errors, marker=".", capsize=2, label=name.split("@")[0])
        rows += [
            [name, cell["length"], cell["samples"], cell[key], cell[f"{key}_standard_error"]]
            + [cell.get(prefix + column, "") for column in COLUMNS for prefix in ("", "control_")]
            for cell in cells
        ]
    axes.axhline(0, color="black", linewidth=0.8)
    position_axis(axes, "length (tokens)")
    axes.set_ylabel("gain (nats per token)")
    axes.legend()
    header = ["task", "length (tokens)", "examples", "gain (nats/token)", "standard error (nats/token)"]
    header += [f"{name}{control}" for name in COLUMNS for control in ("", ", control")]
    return Chart(figure, header, rows)


def _table(task: GridTask, cells: list[dict[str, Any]]) -> str:
    scores = [key for key in task.scores if key in cells[0]]
    gains = [key for key in cells[0] if key.startswith("gain_over_") and not key.endswith("_error")]

    def score(cell: dict[str, Any], key: str) -> str:
        form = ".3f" if key == "nats_per_token" else ".1%"
        return f"{with_error(cell[key], cell[f'{key}_standard_error'], form)} ({cell[f'control_{key}']:{form}})"

    header = (
        "length",
        task.counted,
        "examples",
        *[COLUMNS[key] for key in scores],
        *[key.replace("_", " ") for key in gains],
    )
    rows = [
        (
            f"{cell['length']:,}", f"{cell[task.counted]:,}", f"{cell['samples']:,}",
            *[score(cell, key) for key in scores],
            *[with_error(cell[key], cell[f"{key}_standard_error"], "+.3f") for key in gains],
        )
        for cell in cells
    ]  # fmt: skip
    return table(header, rows)


def _of_text(name: str, about: str, make: type[TextQueries], counted: str) -> GridTask:
    def queries(name: str, of: Source) -> Queries:
        return make(name, of.settings.seed, of.tokenizer, of.text, of.settings.target_tokens)

    scores = ("token_accuracy", "nats_per_token")
    return GridTask(f"{name}@text", about, queries, scores, counted=counted)


def _of_words(name: str, about: str, make: type[CountedQueries], *arguments: bool) -> GridTask:
    def queries(name: str, of: Source) -> Queries:
        return make(name, of.settings.seed, of.tokenizer, *arguments)

    scores = ("choice_accuracy", "found_share", "nats_per_token")
    return GridTask(f"{name}@own-words", about, queries, scores, counted=make.counted)


TASKS = [
    _of_text("copying", "a passage and its repetition, by distance; control: another passage", Copying, "distance"),
    _of_text(
        "context_gain",
        "the same tokens with and without the first half of the length; control: another text",
        ContextGain,
        "removed",
    ),
    _of_words(
        "many_shot_seen",
        "words and permuted labels, 8 to 4,096 shots; the word of the question is in the shots",
        ManyShot,
        True,
    ),
    _of_words(
        "many_shot_unseen",
        "the same with another word of a kind in the shots; control of both: random labels",
        ManyShot,
        False,
    ),
    _of_words("passages", "k passages, one has the answer; control: a passage about somebody else instead", Passages),
]
FAMILY = Family("context", TASKS, ContextConfig, section)
