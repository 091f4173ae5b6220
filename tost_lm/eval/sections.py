"""Sections of a report with the results of all evaluations of a checkpoint."""

from collections.abc import Iterator

from tost_lm.report import protocols, retrieval
from tost_lm.report.page import Page
from tost_lm.report.record import EvaluatedModel


def evaluation_sections(run: EvaluatedModel, page: Page) -> Iterator[str]:
    """A section for each evaluation; a section without results is empty or has the command that evaluates."""
    yield retrieval.needle(run, page)
    yield retrieval.tasks(run, page)
    yield retrieval.context(run, page)
    yield protocols.heldout(run)
    yield protocols.zero_shot(run)
    yield protocols.length_extrapolation(run, page)
    yield protocols.text(run)
    yield protocols.sample(run)
