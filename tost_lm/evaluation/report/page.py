"""One page and its files: report.md, report.html, and each figure as PNG, PDF and CSV, some also as LaTeX."""

import base64
from collections.abc import Iterable
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt

from tost_lm.evaluation.report.charts import Chart
from tost_lm.files import write_whole

STYLE = """
body { max-width: 52rem; margin: 2rem auto; padding: 0 1rem; font: 16px/1.55 system-ui, sans-serif; color: #1b1b1b;
       background: #fff; }
h1, h2 { line-height: 1.25; } h2 { margin-top: 2.2rem; border-bottom: 1px solid #ddd; padding-bottom: .2rem; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { border: 1px solid #ccc; padding: .3rem .7rem; text-align: left; overflow-wrap: anywhere; }
th { background: #f3f5f7; }
pre { background: #f6f8fa; padding: .8rem; overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
img { max-width: 100%; height: auto; }
blockquote { margin: 1rem 0; padding: .1rem 1rem; border-left: 4px solid #c77700; background: #fff7e8; }
"""


class Page:
    """A report while it is made."""

    def __init__(self, title: str, figures: str):
        """`figures` is where its figures lie, seen from the page."""
        self.title, self.figures = title, figures
        self.charts: dict[str, Chart] = {}

    def show(self, name: str, chart: Chart, alternative: str) -> str:
        """Keep a figure and return the Markdown that shows it."""
        self.charts[f"{self.figures}/{name}"] = chart
        return f"![{alternative}]({self.figures}/{name}.png)"

    def whereabouts(self) -> str:
        """Where the figures lie that were shown so far, in a sentence; empty if there are none."""
        if not self.charts:
            return ""
        tables = "; those that are tables also as LaTeX" if any(chart.latex for chart in self.charts.values()) else ""
        return f"The figures lie in `{self.figures}/` as PNG and PDF, and the numbers drawn in them as CSV{tables}."

    def write(self, folder: Path, sections: Iterable[str]) -> Path:
        """Make the sections, then write all files into `folder`. Returns the path of report.html."""
        markdown = to_markdown(sections)
        pictures = {}
        for name, chart in self.charts.items():
            files = chart.files()
            pictures[f"{name}.png"] = files["png"]
            for ending, data in files.items():
                write_whole(folder / f"{name}.{ending}", data)
        write_whole(folder / "report.md", markdown)
        write_whole(folder / "report.html", to_html(markdown, pictures, self.title))
        return folder / "report.html"


def to_markdown(sections: Iterable[str]) -> str:
    """One text; empty sections are left out."""
    return "\n\n".join(section.strip() for section in sections if section) + "\n"


def to_html(markdown: str, pictures: dict[str, bytes], title: str) -> str:
    """One page that needs nothing else: styles inside, each picture (by the path that the text gives it) embedded."""
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)
    for name, png in pictures.items():
        # A quotation mark in text is escaped, so this is found in tags only.
        body = body.replace(f'src="{name}"', f'src="data:image/png;base64,{base64.b64encode(png).decode()}"')
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}</body>\n</html>\n"
    )
