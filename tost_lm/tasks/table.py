"""The lines of the table with all results of a model."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tost_lm.markdown import format_result

NOTHING = "–"
OWN_TEXT, OWN_SENTENCES = "no: the text is our own", "no: the sentences are our own"
HEADER = ("task", "metric", "result", "chance, control", "examples", "length in tokens", "published", "comparable")


class TableRow(NamedTuple):
    """A line of the table; a line with an empty task continues the line above with another published result."""

    task: str
    metric: str
    result: str
    reference: str
    """Chance level, result of the control, or a baseline."""
    examples: str
    length: str
    published: str = NOTHING
    comparable: str = NOTHING


def shown_result(key: str, totals: Mapping[str, Any], examples: int) -> str:
    """A result as it is cited, with its standard error, or that it has none, as with a single example."""
    if examples > 1 and totals.get(f"{key}_standard_error") is not None:
        return format_result(key, totals)
    return f"{format_result(key, {key: totals[key]})} (no standard error)"


def in_words(key: str) -> str:
    return key.replace("_", " ")
