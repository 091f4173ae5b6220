"""A figure of a report as PNG and PDF, its data as CSV and, if useful, as a LaTeX table.

The same data gives the same bytes.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter


@dataclass(frozen=True)
class Chart:
    """A figure and its data."""

    drawing: Figure
    header: Sequence[str]
    """Column names, each with the unit in parentheses."""
    rows: Sequence[Sequence[Any]]
    latex: str = ""
    """A LaTeX table of the data; empty if there is none."""

    def files(self) -> dict[str, bytes]:
        """Content of the files by extension."""
        files = {
            "png": self._drawn("png", dpi=130, metadata={"Software": None}),
            "pdf": self._drawn("pdf", metadata={"CreationDate": None}),
            "csv": self.table().encode(),
        }
        return files | ({"tex": self.latex.encode()} if self.latex else {})

    def table(self) -> str:
        """The data as CSV."""
        lines = io.StringIO()
        csv.writer(lines, lineterminator="\n").writerows([self.header, *self.rows])
        return lines.getvalue()

    def _drawn(self, kind: str, **options: Any) -> bytes:
        file = io.BytesIO()
        self.drawing.savefig(file, format=kind, **options)
        return file.getvalue()


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure with one pair of axes; sizes in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def line_data(x: str, lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> dict[str, Any]:
    """Header and rows of a Chart for lines (xs, ys) by name: one row for each x, empty where a line lacks it."""
    columns = [dict(zip(xs, ys, strict=True)) for xs, ys in lines.values()]
    rows = [[at, *[column.get(at, "") for column in columns]] for at in sorted(set().union(*columns))]
    return {"header": [x, *lines], "rows": rows}


def column(rows: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """One field of all rows [N], float64; NaN where it is null or missing."""
    return np.array([row.get(key) for row in rows], dtype=float)


def marker(points: int) -> str:
    """Dots for few points, so that a single point is visible."""
    return "." if points <= 50 else ""


def step_axis(axes: Any, intervals: int = 9) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(intervals, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("training step")
    axes.grid(alpha=0.3)


def position_axis(axes: Any, label: str) -> None:
    """A log axis for bins of positions or distances whose lengths double."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel(label)
    axes.grid(alpha=0.3)


def log_value_axis(axes: Any) -> None:
    """A log axis for values that are already drawn, with plain numbers as tick labels."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if high > 5 * low else MaxNLocator(5))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
