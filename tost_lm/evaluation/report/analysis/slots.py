"""Report section: half-lives of slot layers, and the ages of what they read."""

from typing import Any

from tost_lm.evaluation.report.analysis.section import analysis_section
from tost_lm.evaluation.report.page import Page
from tost_lm.evaluation.subject import SLOTS
from tost_lm.markdown import table, with_error


@analysis_section("Slot memory", SLOTS)
def slots(results: dict[str, Any], page: Page) -> list[str]:
    """A row for each head, a column for each bin of positions."""
    rows = [
        (str(layer + 1), str(head + 1), f"{half_life:,.3g}", *_cells(results, layer, head))
        for layer, half_lives in enumerate(results["half_life"])
        for head, half_life in enumerate(half_lives)
    ]
    return [
        "Effective memory length of each head: the mean age in tokens of what it reads, by the position of the reading "
        f"token; mean over {results['sequences']} sequences ± standard error over documents.",
        table(("slot layer", "head", "half-life", *[f"up to {end:,}" for end in results["position_ends"]]), rows),
    ]


def _cells(results: dict[str, Any], layer: int, head: int) -> list[str]:
    ages = results["age"][layer][head]
    errors = results["standard_error"][layer][head] if results["standard_error"] else [None] * len(ages)
    return [with_error(age, error, ".1f") for age, error in zip(ages, errors, strict=True)]
