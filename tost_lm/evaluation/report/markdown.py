"""Markdown of plain texts."""

import re
from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of plain texts."""
    lines = [["---"] * len(header), *[[escape(cell) for cell in row] for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in [[escape(cell) for cell in header], *lines])


def fenced(text: str) -> str:
    """A code block that holds any text: its fence is longer than any run of backticks inside."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"


def escape(text: str) -> str:
    """Plain text as Markdown that shows it, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>#|~&])", r"\\\1", " ".join(text.split()))
