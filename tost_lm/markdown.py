"""Markdown from plain text."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tost_lm.intervals import wilson

NUMBER = r"[<+−-]? ?\d[\d.,]*(?:e[+-]?\d+)?%?"
NUMBERS = re.compile(rf"{NUMBER}(?:(?: ± | of |, | / ){NUMBER})*(?: \(.*\))?|NaN|–|")
LONG_CELL = 40
"""A column with a longer text gets `:---`; its cells may wrap in report.html."""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of plain text; columns of numbers are aligned right."""
    lines = [header, *rows]
    text = ["| " + " | ".join(map(escape, line)) + " |" for line in lines]
    columns = [_alignment([row[i] for row in rows]) for i in range(len(header))]
    return "\n".join([text[0], f"| {' | '.join(columns)} |", *text[1:]])


def with_error(mean: float, standard_error: float | None, form: str) -> str:
    """A mean ± its standard error, if there is one."""
    return f"{mean:{form}}" + ("" if standard_error is None else f" ± {standard_error:{form.strip('+')}}")


def with_interval(score: float, count: float, form: str) -> str:
    """A mean of scores from 0 to 1, with the 95 % interval over their `count` examples."""
    low, high = wilson(score, count)
    return f"{score:{form}} ({low:{form}} to {high:{form}})"


def format_result(headline: str, totals: Mapping[str, Any]) -> str:
    """A result as it is cited: an accuracy of so many examples with its 95 % interval, others with their standard
    error if there is one."""
    error, count = totals.get(f"{headline}_standard_error"), totals.get("examples", totals.get("samples"))
    is_score = headline.endswith(("accuracy", "share"))
    if is_score and count:
        return with_interval(totals[headline], count, ".2%")
    form = ".2%" if is_score else ",.4f" if totals[headline] < 10 else ",.2f"
    return f"{totals[headline]:{form}}" + ("" if error is None else f" ± {error:{form}}")


def format_chance(chance: float) -> str:
    """The score of a guess."""
    return f"{chance:.0%}" if chance > 0.001 else "< 0.1%"


def fenced(text: str) -> str:
    """A code block for any text."""
    fence = _fence(text, 3)
    return f"{fence}text\n{text}\n{fence}"


def code(text: str) -> str:
    """Any text as code on one line, outside of tables."""
    line = " ".join(text.splitlines())
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{_fence(line, 1)}{pad}{line}{pad}{_fence(line, 1)}"


def _fence(text: str, least: int) -> str:
    """More backticks than any run of them in a text, at least `least`."""
    return "`" * max(least, 1 + max(map(len, re.findall("`+", text)), default=0))


def escape(text: str) -> str:
    """Plain text as Markdown on one line: no link, image, address or tag in it is live."""
    return re.sub(r"([\\`*_{}\[\]<>#|~&]|:(?=//)|(?<=www)\.)", r"\\\1", " ".join(text.split()))


def _alignment(cells: Sequence[str]) -> str:
    if any(cells) and all(map(NUMBERS.fullmatch, cells)):
        return "---:"
    return ":---" if max(map(len, cells), default=0) > LONG_CELL else "---"
