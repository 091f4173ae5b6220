"""Needles in a haystack: a word of several names each in a long text, by length and depth."""

from functools import partial

from tost_lm.data.passages import TEST_NAMES, TEST_WORDS
from tost_lm.tasks.grid import GridTask, section
from tost_lm.tasks.queries import Form, HaystackConfig, KeyedQueries
from tost_lm.tasks.task import Family

NAME = "needle@keys"


def stated(name: str) -> str:
    """The beginning of the sentence, which the word follows."""
    return f"In secret they named {name}"


FORM = Form(TEST_NAMES, TEST_WORDS, lambda name, word: (f" {stated(name)}", f" {word}", ".\n"), stated)
"""After Kamradt 2023, small enough for a small model. No recall passage (`tost_lm/data/passages.py`) has the sentence,
a name or a word."""

FAMILY = Family(
    "needle",
    [
        GridTask(
            NAME,
            "a word for each of several names in a text, which are asked: a grid of length by depth",
            partial(KeyedQueries, form=FORM),
            "choice_accuracy",
            column=("needle choice accuracy", ".1%"),
        )
    ],
    HaystackConfig,
    section,
)
