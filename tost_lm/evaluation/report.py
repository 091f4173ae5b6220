"""The report of a run: one Markdown text, its pictures, and the same as one self-contained HTML page."""

import base64
from importlib.util import find_spec
from pathlib import Path

from tost_lm.errors import ConfigError
from tost_lm.evaluation.run_record import RunRecord
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


def write_report(folder: Path) -> Path:
    """Write report.md, its pictures under eval/report/ and report.html into a run folder.

    Returns:
        The path of report.html.

    Raises:
        ConfigError: it is no run folder, or the report's packages are not installed.
        CheckpointError: the run has no valid checkpoint.
    """
    for package in ("markdown_it", "matplotlib"):
        if not find_spec(package):
            raise ConfigError(f"the report needs {package}: pip install 'tost-lm[report]'")
    from tost_lm.evaluation.report_sections import Report, all_sections

    run = RunRecord.read(folder)
    report = Report(run)
    markdown = "\n\n".join(section.strip() for section in all_sections(report)) + "\n"
    for name, png in report.pictures.items():
        write_whole(folder / name, png)
    write_whole(folder / "report.md", markdown)
    write_whole(folder / "report.html", to_html(markdown, report.pictures, title=report.title))
    return folder / "report.html"


def to_html(markdown: str, pictures: dict[str, bytes], title: str) -> str:
    """One page that needs nothing else: styles inside, each picture (by the path that the text gives it) embedded."""
    from html import escape

    from markdown_it import MarkdownIt

    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)
    for name, png in pictures.items():
        # A quotation mark in text is escaped, so this is found in tags only.
        body = body.replace(f'src="{name}"', f'src="data:image/png;base64,{base64.b64encode(png).decode()}"')
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}</body>\n</html>\n"
    )
