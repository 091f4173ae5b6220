"""Files of a report: report.md, report.html, and each figure as PNG and CSV.

The same data gives the same bytes. matplotlib belongs to the extra `report`, so it is imported on first use.
"""

import base64
import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tost_lm.errors import ConfigError, install_hint
from tost_lm.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DARK, CONTRAST = "#0b3c6f", "#c77700"
LIGHT_ABOVE = 55  # light colours need black text
POSITION = "position in the document (tokens, end of the bin)"


@dataclass(frozen=True)
class Chart:
    """A figure and its data."""

    drawing: "Figure"
    header: Sequence[str]
    """Column names, each with the unit in parentheses."""
    rows: Sequence[Sequence[Any]]

    def picture(self) -> bytes:
        """The figure as PNG."""
        file = io.BytesIO()
        self.drawing.savefig(file, format="png", dpi=130, metadata={"Software": None})
        return file.getvalue()

    def table(self) -> str:
        """The data as CSV."""
        lines = io.StringIO()
        csv.writer(lines, lineterminator="\n").writerows([self.header, *self.rows])
        return lines.getvalue()


def new_figure(width: float, height: float) -> "tuple[Figure, Axes]":
    """A figure with one pair of axes; sizes in inches."""
    figure, (axes,) = new_panels(width, height, 1)
    return figure, axes


def new_panels(width: float, height: float, columns: int, **shared: Any) -> "tuple[Figure, list[Axes]]":
    """A figure with several pairs of axes in a row; sizes in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False, **shared).ravel())


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


def step_axis(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(9, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("training step")
    axes.grid(alpha=0.3)


def position_axis(axes: Any, label: str) -> None:
    """A log axis for bins of positions or distances whose lengths double."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel(label)
    axes.grid(alpha=0.3)


def draw_heatmap(axes: Any, percent_RL: np.ndarray, lengths: Sequence[int], names: Sequence[str]) -> Any:
    """Rows by length; NaN stays white. Returns the image for its colour bar."""
    # cividis has even lightness and is safe for red-green colour blindness.
    image = axes.imshow(percent_RL, cmap="cividis", vmin=0, vmax=100, aspect="auto")
    for (row, i), value in np.ndenumerate(percent_RL):
        if np.isfinite(value):
            colour = "black" if value > LIGHT_ABOVE else "white"
            axes.text(i, row, f"{value:.0f}", ha="center", va="center", color=colour)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("length (tokens)")
    return image


STYLE = """
body { max-width: 70rem; margin: 2rem auto; padding: 0 1rem; font: 16px/1.55 system-ui, sans-serif; color: #1b1b1b;
       background: #fff; }
h1, h2 { line-height: 1.25; } h2 { margin-top: 2.2rem; border-bottom: 1px solid #ddd; padding-bottom: .2rem; }
p, pre, blockquote { max-width: 52rem; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { border: 1px solid #ccc; padding: .3rem .7rem; text-align: left; vertical-align: top; white-space: nowrap; }
th, td[style*="left"] { white-space: normal; }
th span, td span { white-space: nowrap; }
td[style*="left"] { min-width: 16rem; }
th { background: #f3f5f7; vertical-align: bottom; }
pre { background: #f6f8fa; padding: .8rem; overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
img { max-width: 100%; height: auto; }
blockquote { margin: 1rem 0; padding: .1rem 1rem; border-left: 4px solid #c77700; background: #fff7e8; }
"""
CELL = re.compile(r"(?<=>)[^<]*(?=</t[dh]>)")
UNBROKEN = re.compile(r"\S+ ± \S+|\S*[-/]\S*")
"""In a cell, browsers would otherwise break a line after the hyphens and slashes of these words."""


class Page:
    """Title and figures of a report; `figures` is their folder relative to the page."""

    def __init__(self, title: str, figures: str):
        self.title, self.figures = title, figures
        self.charts: dict[str, Chart] = {}

    def add_figure(self, name: str, chart: Chart, alt_text: str) -> str:
        """Keep a figure and return the Markdown that shows it."""
        self.charts[f"{self.figures}/{name}"] = chart
        return f"![{alt_text}]({self.figures}/{name}.png)"

    def figure_files(self) -> str:
        """A sentence about the files of the figures so far; empty if there are none."""
        if not self.charts:
            return ""
        return f"Figures are in `{self.figures}/` as PNG, their data as CSV."

    def write(self, folder: Path, sections: Iterable[str]) -> Path:
        """Write all files into `folder` once all sections are complete. Returns the path of report.html."""
        markdown = to_markdown(sections)
        pictures = {f"{name}.png": chart.picture() for name, chart in self.charts.items()}
        files = pictures | {f"{name}.csv": chart.table() for name, chart in self.charts.items()}
        for name, content in files.items():
            write_atomically(folder / name, content)
        write_atomically(folder / "report.md", markdown)
        write_atomically(folder / "report.html", to_html(markdown, pictures, self.title))
        return folder / "report.html"


def to_markdown(sections: Iterable[str]) -> str:
    """The sections as one text, without empty ones."""
    return "\n\n".join(section.strip() for section in sections if section) + "\n"


def to_html(markdown: str, pictures: dict[str, bytes], title: str) -> str:
    """One self-contained page; `pictures` are the PNG data of its images by their path in the text."""
    from markdown_it import MarkdownIt

    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)
    body = CELL.sub(lambda cell: UNBROKEN.sub(r"<span>\g<0></span>", cell[0]), body)
    for name, png in pictures.items():
        # Text has its quotation marks escaped, so only tags match.
        body = body.replace(f'src="{name}"', f'src="data:image/png;base64,{base64.b64encode(png).decode()}"')
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}</body>\n</html>\n"
    )


def require_packages() -> None:
    """Raises ConfigError that names a package of reports that is not installed."""
    for package in ("markdown_it", "matplotlib"):
        if not find_spec(package):
            raise ConfigError(f"the report needs a package: {package}; {install_hint('report')}")
