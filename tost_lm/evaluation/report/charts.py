"""A figure of a report as PNG and PDF, its data as CSV and, if useful, as a LaTeX table.

The same data gives the same bytes. matplotlib belongs to the extra `report`, so it is imported on first use.

Figures by TSSA layer have a line for each layer, from dark for the first to light for the last, or one panel each.
"""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LIGHT, DARK, CONTRAST = "#8fb4d9", "#0b3c6f", "#c77700"
LIGHTEST = 0.85  # of cividis, which has even lightness and is safe for red-green colour blindness
SHAPES = "os^DvP*X"
NAMED_LAYERS = 8
PANELS = 4
MAX_TICKS = 8
POSITION = "position in the document (tokens, end of the bin)"
LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--", "±": r"$\pm$",
    "<": "$<$", ">": "$>$",
}  # fmt: skip


@dataclass(frozen=True)
class Chart:
    """A figure and its data."""

    drawing: "Figure"
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


def new_figure(width: float, height: float) -> "tuple[Figure, Axes]":
    """A figure with one pair of axes; sizes in inches."""
    figure, (axes,) = new_panels(width, height, 1)
    return figure, axes


def new_panels(width: float, height: float, columns: int, rows: int = 1, **shared: Any) -> "tuple[Figure, list[Axes]]":
    """A figure with several pairs of axes, row by row; sizes in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **shared).ravel())


def shade(fraction: float, colours: str = "cividis") -> Any:
    """A colour of one of matplotlib's colour maps."""
    from matplotlib import colormaps

    return colormaps[colours](fraction)


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
    from matplotlib.ticker import MaxNLocator

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
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if high > 5 * low else MaxNLocator(5))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def tabular(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A tabular of plain text: the first column aligned left, the others right."""
    lines = [" & ".join(map(_escape_latex, row)) + r" \\" for row in (header, *rows)]
    columns = "l" + "r" * (len(header) - 1)
    return "\n".join([rf"\begin{{tabular}}{{{columns}}}", lines[0], r"\hline", *lines[1:], r"\end{tabular}", ""])


def _escape_latex(text: str) -> str:
    """Plain text as LaTeX."""
    return re.sub("|".join(map(re.escape, LATEX)), lambda found: LATEX[found[0]], text)


def layers_chart(
    x: str, xs: Sequence[float], panels: Mapping[str, Sequence[Sequence[float | None]]], *, steps: bool = False
) -> Chart:
    """Panels side by side with a line for each layer; `panels` are values [L][X] by axis label.

    The xs are training steps, or the ends of bins whose lengths double.
    """
    figure, grid = new_panels(0.9 + 3.0 * len(panels), 3.2, len(panels))
    lines: dict[str, tuple[Sequence[float], Sequence[Any]]] = {}
    for axes, (label, found_LX) in zip(grid, panels.items(), strict=True):
        values_LX = np.array(found_LX, dtype=float)
        draw_layers(axes, xs, values_LX)
        if steps:
            step_axis(axes, intervals=3)
        else:
            position_axis(axes, x)
        if (values_LX < 0).any():
            axes.axhline(0, color="0.5", linewidth=1)
        axes.set_ylabel(label)
        lines |= {name: (xs, line) for name, line in layer_columns(found_LX, label).items()}
    add_layer_legend(figure, len(next(iter(panels.values()))))
    return Chart(figure, **line_data(x, lines))


def draw_layers(axes: Any, xs: Sequence[float], values_LX: Any) -> None:
    """A line for each layer of values [L, X]."""
    for number, values in enumerate(values_LX, start=1):
        fraction = (number - 1) / max(len(values_LX) - 1, 1)
        shape = SHAPES[number - 1] if len(values_LX) <= NAMED_LAYERS else "."
        axes.plot(xs, values, color=shade(LIGHTEST * fraction), marker=shape, markersize=4, label=number)


def add_layer_legend(figure: "Figure", layers: int) -> None:
    """A legend, or a colour bar for more than `NAMED_LAYERS` layers."""
    if layers <= NAMED_LAYERS:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, title="TSSA layer", loc="outside right center")
    else:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize

        scale = ScalarMappable(Normalize(1, 1 + (layers - 1) / LIGHTEST), "cividis")
        bar = figure.colorbar(scale, ax=figure.axes, label="TSSA layer")
        bar.ax.set_ylim(1, layers)


def number_ticks(axis: Any, count: int, first: int) -> None:
    """Ticks labelled 1 to `count` on an axis where 1 is at `first`; at most `MAX_TICKS` of them."""
    indices = range(0, count, -(-count // MAX_TICKS))
    axis.set_ticks([first + index for index in indices], [str(index + 1) for index in indices])


def layer_columns(values_LX: Sequence[Sequence[Any]], name: str) -> dict[str, Sequence[Any]]:
    """A column for each layer."""
    return {f"{name}, TSSA layer {number}": values for number, values in enumerate(values_LX, start=1)}


def select_layers(layers: int) -> list[int]:
    """Indices of up to `PANELS` evenly spaced layers, with the first and the last."""
    return np.unique(np.linspace(0, layers - 1, PANELS).round().astype(int)).tolist()
