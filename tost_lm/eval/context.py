"""Use of the context: copying, gain per token, many-shot mapping and answers from passages, each with controls.

Copying of a repeated passage, protocol `copying@text`.

    repeated   [EOT] passage · text between · cue → rest of the passage
    control    [EOT] another passage · text between · cue → rest of the passage
    first      [EOT] cue → rest of the passage

The cue is the first 8 tokens of the passage. The same tokens are scored under each condition, at the second occurrence,
after another passage of the same size, and at the first occurrence. Passages and the text between are neighbours in the
text, so the control has the same subject.

Gain per token from context, protocol `context_gain@text`.

    whole     [EOT] first half · second half
    control   [EOT] as many tokens of another document · second half
    cut       [EOT] second half

The last tokens of the second half are scored, the same ones under each condition. The halves are from one document. The
gain over the control is what the tokens farther away than half of the length are worth. The gain over `cut` also has
what the length alone does to the model: one that was trained at one length may predict badly at another.

Many-shot mapping of words to labels, protocols `many_shot_seen@own-words` and `many_shot_unseen@own-words`.

    Each line has a word and the label of its kind.
    falcon C
    hammer A
    …
    heron → C

There are eight kinds of words and eight labels. Each example permutes the labels, so the mapping must be read from its
shots. The kinds are equally frequent. In `seen`, the word of the question is in the shots; in `unseen` it is not, so
the model must know which words are of one kind. The answer is the likeliest of the eight labels; chance is 1/8. The
labels of the control's shots are drawn independently of the words.

Answers from passages, protocol `passages@own-words`: one of k passages has the answer.

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
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, product
from typing import Any

import numpy as np

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import ConfigError, DataError
from tost_lm.eval.retrieval.grid import lengths_of
from tost_lm.eval.retrieval.haystacks import Text, noise_haystack
from tost_lm.eval.retrieval.tasks import Example, Task
from tost_lm.eval.suite_settings import LABELS, MAX_PASSAGES, ContextTasksConfig
from tost_lm.inference.generation import ModelFacts
from tost_lm.inference.protocol_names import CONTEXT_GAIN, COPYING, MANY_SHOT_SEEN, PASSAGES


class CountedTask(Task):
    """Base class; a task defines its texts.

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

    def __init__(self, seed: int, tokenizer: Tokenizer):
        self.seed, self.tokenizer = seed, tokenizer
        self.encode = cache(tokenizer.encode)
        self._noise = noise_haystack(tokenizer)

    @abstractmethod
    def texts(self, count: int, draws: np.random.Generator) -> tuple[Example, ...]:
        """An example under each condition, without an end of text and repeated sentences before it."""

    def lengths_of(self, counts: Sequence[int], model: ModelFacts) -> list[int]:
        """The lengths of the cells: for the counts given, else for the default counts that fit the model's positions.

        Raises:
            ConfigError: a length exceeds the model's positions.
        """
        fitting = [count for count in self.counts if self._length(count) <= model.context_length]
        chosen, limit = counts or fitting or self.counts[:1], model.position_limit
        for count in chosen:
            if limit is not None and self._length(count) > limit:
                raise ConfigError(
                    f"context.{self.counted}: {count} take {self._length(count):,} tokens in {self.name}, more than "
                    f"the model's positions ({limit:,}); lower it, or leave the task out of context.tasks"
                )
        return [self._length(count) for count in chosen]

    def needed(self, samples: int) -> int:
        return self.frame

    def facts(self, length: int) -> dict[str, int]:
        return {self.counted: (length - self.frame) // self.longest}

    def example(self, length: int, depth: float | None, sample: int) -> tuple[Example, ...]:
        count = self.facts(length)[self.counted]
        draws = self.draws(count, sample)

        def fill(text: Example) -> Example:
            noise = self._noise(length - self.room - 1 - len(text.prompt))
            return replace(text, prompt=np.concatenate([[self.tokenizer.eot], noise, text.prompt]).astype(np.int64))

        return tuple(map(fill, self.texts(count, draws)))

    def join(self, strings: Sequence[str]) -> np.ndarray:
        """Ids of strings that are encoded separately, so that a value has the same ids everywhere: int64."""
        return np.array(list(chain.from_iterable(map(self.encode, strings))), np.int64)

    def _length(self, count: int) -> int:
        return self.frame + count * self.longest


CUE_TOKENS = 8


class Copying(Task):
    """The cells of a length have a fixed distance between the occurrences."""

    name, conditions = COPYING, ("repeated", "control", "first")

    def __init__(self, seed: int, tokenizer: Tokenizer, text: Text, target_tokens: int):
        self.seed, self.eot, self.text, self.room = seed, tokenizer.eot, text, target_tokens
        self.chance = 1 / tokenizer.vocab_size
        self.passage_tokens = CUE_TOKENS + target_tokens

    def needed(self, samples: int) -> int:
        return 2 * self.passage_tokens

    def facts(self, length: int) -> dict[str, int]:
        """The distance of a scored token from its first occurrence."""
        return {"distance": length - 1 - self.passage_tokens}

    def example(self, length: int, depth: float | None, sample: int) -> tuple[Example, ...]:
        assert self.text is not None
        source, size = self.text.for_length(length), length - 1 - self.passage_tokens
        draws = self.draws(length, sample)
        start = int(draws.integers(len(source) - size - self.passage_tokens + 1))
        passage, other, between = np.split(
            source[start : start + size + self.passage_tokens], [self.passage_tokens, 2 * self.passage_tokens]
        )
        cue, target = passage[:CUE_TOKENS], tuple(passage[CUE_TOKENS:].tolist())

        def make(*before: np.ndarray) -> Example:
            return Example(np.concatenate([[self.eot], *before, cue]), "", (), (target,), 0)

        return make(passage, between), make(other, between), make()


class ContextGain(Task):
    """The cells of a length show the gain from one range of distances."""

    name, conditions = CONTEXT_GAIN, ("whole", "control", "cut")

    def __init__(self, seed: int, tokenizer: Tokenizer, text: Text, target_tokens: int):
        self.seed, self.eot, self.text, self.room = seed, tokenizer.eot, text, target_tokens
        self.chance = 1 / tokenizer.vocab_size

    def needed(self, samples: int) -> int:
        return 2 * self.room + 2

    def facts(self, length: int) -> dict[str, int]:
        """The number of first tokens that `cut` lacks and the control replaces."""
        return {"removed": length // 2}

    def example(self, length: int, depth: float | None, sample: int) -> tuple[Example, ...]:
        assert self.text is not None
        documents, removed = self.text.documents(length), length // 2
        draws = self.draws(length, sample)
        own, other = (documents[i] for i in draws.choice(len(documents), 2, replace=False))
        start, elsewhere = (int(draws.integers(len(x) - n + 1)) for x, n in ((own, length - 1), (other, removed)))
        window, target_start = own[start : start + length - 1], length - 1 - self.room
        context, target = window[:target_start], tuple(window[target_start:].tolist())

        def make(first: np.ndarray) -> Example:
            return Example(np.concatenate([[self.eot], first, context[removed:]]), "", (), (target,), 0)

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


class ManyShot(CountedTask):
    """One of the two protocols."""

    chance, conditions = 1 / LABELS, ("mapping", "control")
    counted, counts = "shots", tuple(2**n for n in range(3, 13))

    def __init__(self, name: str, seed: int, tokenizer: Tokenizer):
        super().__init__(seed, tokenizer)
        self.name, self.is_seen = name, name == MANY_SHOT_SEEN
        self.labels = tuple(tuple(self.encode(f" {name}")) for name in NAMES)
        self.room = max(map(len, self.labels))
        longest = max(len(self.encode(word)) for words in KINDS for word in words)
        self.frame = 1 + len(self.encode(SHOTS_INTRO)) + longest + self.room
        self.longest = longest + self.room + len(self.encode("\n"))

    def texts(self, count: int, draws: np.random.Generator) -> tuple[Example, ...]:
        kinds = draws.permutation(np.resize(draws.permutation(LABELS), count))
        asked = int(draws.integers(LABELS))
        new = int(draws.integers(len(KINDS[asked])))
        words = [self._draw(int(kind), new if kind == asked else None, draws) for kind in kinds]
        of_kind = [word for kind, word in zip(kinds, words, strict=True) if kind == asked]
        question = of_kind[int(draws.integers(len(of_kind)))] if self.is_seen else KINDS[asked][new]
        label_of_kind = draws.permutation(LABELS)
        right = int(label_of_kind[asked])

        def make(labels: np.ndarray) -> Example:
            shots = [x for word, label in zip(words, labels, strict=True) for x in (word, f" {NAMES[label]}", "\n")]
            return Example(self.join([SHOTS_INTRO, *shots, question]), question, (), self.labels, right)

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


class Passages(CountedTask):
    """The cells of a length have a fixed number of passages."""

    name, chance = PASSAGES, 1 / len(CITIES)
    conditions, counted, counts = ("passage", "control"), "passages", tuple(2**n for n in range(10))

    def __init__(self, seed: int, tokenizer: Tokenizer):
        super().__init__(seed, tokenizer)
        self.options = tuple(tuple(tuple(self.encode(f" {value}")) for value in kind) for kind in VALUES)
        self.room = max(len(ids) for options in self.options for ids in options)
        widest = [max(range(len(options)), key=lambda i, o=options: len(o[i])) for options in self.options]
        self.longest = max(len(self.join(_passage(*person, (*widest, widest[0])))) for person in PEOPLE)
        questions = (_question(*person, asked) for person in PEOPLE for asked in range(len(VALUES)))
        self.frame = (
            1 + len(self.encode(FACTS_INTRO)) + max(len(self.join(strings)) for strings in questions) + self.room
        )

    def texts(self, count: int, draws: np.random.Generator) -> tuple[Example, ...]:
        chosen = [PEOPLE[int(i)] for i in draws.choice(len(PEOPLE), count + 1, replace=False)]
        facts = draws.integers(len(CITIES), size=(count + 1, 4))
        texts = [_passage(*person, own) for person, own in zip(chosen, facts, strict=True)]
        about, asked = int(draws.integers(count)), int(draws.integers(len(VALUES)))
        question, right = _question(*chosen[about], asked), int(facts[about, asked])

        def make(shown: Sequence[Sequence[str]]) -> Example:
            prompt = self.join([FACTS_INTRO, *chain.from_iterable(shown), *question])
            return Example(prompt, "".join(question), (VALUES[asked][right],), self.options[asked], right)

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


def make_tasks(settings: ContextTasksConfig, tokenizer: Tokenizer, text: Callable[[], Text]) -> list[Task]:
    """The tasks of `context.tasks`; `text` is called only if one of them reads text."""
    text = cache(text)
    return [_make(name, settings, tokenizer, text) for name in settings.tasks]


def settings_of(task: Task, settings: ContextTasksConfig) -> dict[str, Any]:
    """The settings that the results of a task depend on, for its identity. Those of the cells are called `lengths`."""
    counts = getattr(settings, task.counted) if isinstance(task, CountedTask) else settings.lengths
    own = {} if isinstance(task, CountedTask) else {"target_tokens": settings.target_tokens}
    return {"lengths": counts, "samples": settings.samples, "seed": settings.seed, **own}


def cell_lengths(settings: ContextTasksConfig, task: Task, model: ModelFacts) -> list[int]:
    """The lengths of a task's cells. By default, context_gain leaves out lengths without documents.

    Raises:
        ConfigError, DataError: as in `lengths_of`, and if the text has no two documents of a length.
    """
    if isinstance(task, CountedTask):
        return task.lengths_of(getattr(settings, task.counted), model)
    lengths = lengths_of(settings.lengths, settings.samples, task, model, "context.lengths")
    for i, length in enumerate(sorted(lengths) if isinstance(task, ContextGain) else []):
        assert task.text is not None
        try:
            task.text.documents(length)
        except DataError:
            if settings.lengths or i == 0:
                raise
            return sorted(lengths)[:i]
    return lengths


def _make(name: str, settings: ContextTasksConfig, tokenizer: Tokenizer, text: Callable[[], Text]) -> Task:
    seed = settings.seed
    if name == COPYING:
        return Copying(seed, tokenizer, text(), settings.target_tokens)
    if name == CONTEXT_GAIN:
        return ContextGain(seed, tokenizer, text(), settings.target_tokens)
    return Passages(seed, tokenizer) if name == PASSAGES else ManyShot(name, seed, tokenizer)
