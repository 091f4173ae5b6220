"""A figure of a report: its drawing as PNG and PDF, the numbers in it as CSV, and where they make a table as LaTeX.

The same numbers give the same bytes.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure


@dataclass(frozen=True)
class Chart:
    """A drawing and what is drawn."""

    drawing: Figure
    header: Sequence[str]
    """Names of the columns, each with its unit in parentheses."""
    rows: Sequence[Sequence[Any]]
    latex: str = ""
    """The same as a table, where it is one."""

    def files(self) -> dict[str, bytes]:
        """The figure's files by their ending."""
        files = {
            "png": self._drawn("png", dpi=130, metadata={"Software": None}),
            "pdf": self._drawn("pdf", metadata={"CreationDate": None}),
            "csv": self.table().encode(),
        }
        return files | ({"tex": self.latex.encode()} if self.latex else {})

    def table(self) -> str:
        """As CSV."""
        lines = io.StringIO()
        csv.writer(lines, lineterminator="\n").writerows([self.header, *self.rows])
        return lines.getvalue()

    def _drawn(self, kind: str, **options: Any) -> bytes:
        file = io.BytesIO()
        self.drawing.savefig(file, format=kind, **options)
        return file.getvalue()


def joined(x: str, lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> dict[str, Any]:
    """A Chart's header and rows for lines (xs, ys) by name: a row for each x of any line, empty where one has none."""
    columns = [dict(zip(xs, ys, strict=True)) for xs, ys in lines.values()]
    rows = [[at, *[column.get(at, "") for column in columns]] for at in sorted(set().union(*columns))]
    return {"header": [x, *lines], "rows": rows}


def column(rows: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """A value of each row, [N] float64; NaN where it is null or missing."""
    return np.array([row.get(key) for row in rows], dtype=float)


def marker(points: int) -> str:
    """Dots where there are few points, so that a single one is seen."""
    return "." if points <= 50 else ""
