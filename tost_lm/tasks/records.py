"""Retrieval among distractors, as HELMET's recall (arXiv 2410.02694), in words of our own: the whole text consists of
records of one form, and each word of a key that is asked for also stands in the keys of other records."""

from functools import partial

from tost_lm.tasks.grid import GridTask, section
from tost_lm.tasks.haystacks import ADJECTIVES, NOUNS
from tost_lm.tasks.queries import Form, KeyedQueries, KeysConfig
from tost_lm.tasks.task import Family

NAME = "records@numbers"
KEYS = tuple("-".join(pair) for pair in zip(ADJECTIVES[:112:7], NOUNS[::10], strict=True))
NUMBERS = tuple(str(1_000_003 + 548_699 * n) for n in range(16))


FORM = Form(
    KEYS,
    NUMBERS,
    lambda key, number: (" The number of", f" {key}", " is", f" {number}", ".\n"),
    lambda key: f"Question: What is the number of {key}?\nAnswer: The number of {key} is",
    of_records=True,
)

FAMILY = Family(
    "records",
    [
        GridTask(
            NAME,
            "a text of records with numbers of similar keys, some of which are asked",
            partial(KeyedQueries, form=FORM),
            "choice_accuracy",
        )
    ],
    KeysConfig,
    section,
)
