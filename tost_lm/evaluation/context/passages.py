"""Answers from passages, protocol `passages@own-words`: one of k passages has the answer.

    Read the passages and answer the question.
    Passage: Clara Weaver was born in Rome. At school, Clara was best in music. … later worked as a baker in Paris.
    …
    Question: In which city was Clara Weaver born?
    Answer: Clara Weaver was born in → Rome

Sentences, people and facts are our own. Each passage is about another person with other facts, drawn independently, so
the answer needs the right passage and the right sentence. Its place is drawn. The control has a passage about one more
person instead. Two scores: the likeliest of ten answers (chance 10 %), and the answer in the greedily generated text.
"""

from collections.abc import Sequence
from itertools import chain, product

import numpy as np

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.evaluation.context.counted import CountedTask
from tost_lm.evaluation.context_config import MAX_PASSAGES, PASSAGES
from tost_lm.evaluation.retrieval.tasks import Example

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
INTRO = "Read the passages and answer the question.\n"
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
        self.frame = 1 + len(self.encode(INTRO)) + max(len(self.join(strings)) for strings in questions) + self.room

    def texts(self, count: int, draws: np.random.Generator) -> tuple[Example, ...]:
        chosen = [PEOPLE[int(i)] for i in draws.choice(len(PEOPLE), count + 1, replace=False)]
        facts = draws.integers(len(CITIES), size=(count + 1, 4))
        texts = [_passage(*person, own) for person, own in zip(chosen, facts, strict=True)]
        about, asked = int(draws.integers(count)), int(draws.integers(len(VALUES)))
        question, right = _question(*chosen[about], asked), int(facts[about, asked])

        def make(shown: Sequence[Sequence[str]]) -> Example:
            prompt = self.join([INTRO, *chain.from_iterable(shown), *question])
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
