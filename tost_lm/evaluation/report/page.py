"""Files of a report: report.md, report.html, and each figure as PNG, PDF and CSV, some also as a LaTeX table.

Figures are also logged to wandb on request, each as an image and its data as a table.
"""

import base64
import io
import os
import re
from collections.abc import Iterable, Mapping
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tost_lm.errors import ConfigError
from tost_lm.evaluation.report.charts import Chart
from tost_lm.files import write_atomically

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
        latex = ", and some as LaTeX tables" if any(chart.latex for chart in self.charts.values()) else ""
        return f"Figures are in `{self.figures}/` as PNG and PDF, their data as CSV{latex}."

    def write(self, folder: Path, sections: Iterable[str]) -> Path:
        """Write all files into `folder` once all sections are complete. Returns the path of report.html."""
        markdown = to_markdown(sections)
        pictures = {}
        for name, chart in self.charts.items():
            files = chart.files()
            pictures[f"{name}.png"] = files["png"]
            for ending, data in files.items():
                write_atomically(folder / f"{name}.{ending}", data)
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


def log_to_wandb(name: str, folder: Path, charts: Mapping[str, Chart]) -> None:
    """Log to a separate wandb run in the group `name`, below `folder`; offline unless WANDB_MODE is set.

    Raises:
        ConfigError: wandb is not installed or does not start in the mode of WANDB_MODE.
    """
    if not find_spec("wandb"):
        raise ConfigError("report.wandb needs a package: wandb; run pip install wandb")
    import wandb
    from PIL import Image

    mode = os.environ.get("WANDB_MODE", "offline")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        run = wandb.init(
            project="tost_lm",
            name=f"{name} report",
            group=name,
            job_type="report",
            dir=folder,
            mode=mode,  # pyright: ignore[reportArgumentType]
            # The metadata would contain the command line and the repository's address.
            settings=wandb.Settings(silent=True, console="off", x_disable_meta=True, disable_git=True),
        )
    except (wandb.Error, ValueError) as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"WANDB_MODE={mode}: {why}; set WANDB_MODE to offline or disabled") from None
    shown: dict[str, Any] = {}
    for path, chart in charts.items():
        figure = Path(path).name
        shown[figure] = wandb.Image(Image.open(io.BytesIO(chart.files()["png"])))
        # wandb needs one type per column.
        cells: Any = [["" if cell is None else str(cell) for cell in row] for row in chart.rows]
        shown[f"{figure}_table"] = wandb.Table(columns=list(chart.header), data=cells)
    run.log(shown)
    run.finish()
    wandb.teardown()  # otherwise child processes look for its service
