"""LaTeX tables without packages."""

import re
from collections.abc import Sequence

ESCAPES = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--", "±": r"$\pm$",
    "<": "$<$", ">": "$>$",
}  # fmt: skip


def tabular(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A tabular of plain text: the first column aligned left, the others right."""
    lines = [" & ".join(map(escape, row)) + r" \\" for row in (header, *rows)]
    columns = "l" + "r" * (len(header) - 1)
    return "\n".join([rf"\begin{{tabular}}{{{columns}}}", lines[0], r"\hline", *lines[1:], r"\end{tabular}", ""])


def escape(text: str) -> str:
    """Plain text as LaTeX."""
    return re.sub("|".join(map(re.escape, ESCAPES)), lambda found: ESCAPES[found[0]], text)
