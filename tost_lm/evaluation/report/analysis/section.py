"""Common form of the report sections about `tost eval analyze`."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from tost_lm.evaluation.report.page import Page
from tost_lm.evaluation.report.protocols import checkpoint_line
from tost_lm.evaluation.report.record import EvaluatedModel
from tost_lm.markdown import escape

Paragraphs = Callable[[dict[str, Any], Page], list[str]]


def analysis_section(title: str, protocol: str) -> Callable[[Paragraphs], Callable[[EvaluatedModel, Page], str]]:
    """Make a section from a function that returns its paragraphs; the section is empty without results."""

    def decorate(paragraphs: Paragraphs) -> Callable[[EvaluatedModel, Page], str]:
        @wraps(paragraphs)
        def section(run: EvaluatedModel, page: Page) -> str:
            if (results := run.results(protocol)) is None:
                return ""
            checkpoint = checkpoint_line(run, results, f"tost eval analyze {run.arguments}")
            return "\n\n".join([f"## {title} ({escape(protocol)})", checkpoint, *paragraphs(results, page)])

        return section

    return decorate
