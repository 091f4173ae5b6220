"""Report section of the use of context: a table for each task, and what the context is worth by length."""

from collections.abc import Mapping
from typing import Any

from tost_lm.evaluation.context_config import CONTEXT_GAIN, COPYING, FACTS, TASKS
from tost_lm.evaluation.report.charts import Chart, new_figure, position_axis
from tost_lm.evaluation.report.page import Page
from tost_lm.evaluation.report.protocols import checkpoint_line
from tost_lm.evaluation.report.record import EvaluatedModel
from tost_lm.evaluation.report.retrieval import format_chance
from tost_lm.markdown import escape, table, with_error

COLUMNS = {
    "choice_accuracy": "choice",
    "found_share": "found",
    "token_accuracy": "tokens",
    "nats_per_token": "nats per token",
}
SHOWN: dict[str, tuple[str, ...]] = dict.fromkeys(TASKS, ("choice_accuracy", "found_share", "nats_per_token"))
SHOWN |= dict.fromkeys((COPYING, CONTEXT_GAIN), ("token_accuracy", "nats_per_token"))


def context(run: EvaluatedModel, page: Page) -> str:
    """Copying, gain per token, many-shot mapping and answers from passages; empty without results."""
    found = {name: results for name in TASKS if (results := run.results(name))}
    if not found:
        return ""
    paragraphs = [
        "## Use of context",
        page.add_figure("context", gain_chart(found), "Gain per token from context by length"),
        "Gain: nats per token by which the useful context lowers the answer, against the control in the figure. ± is "
        "the standard error over the examples, for gains of paired differences. Parentheses have the control. Tokens: "
        "fraction of answer tokens that are the most likely ones. Choice: the right answer is the likeliest of all. "
        "Found: it is in the greedily generated text. The figure's CSV file has these scores.",
    ]
    for name, results in found.items():
        command = f"tost eval context {run.arguments} 'context.tasks=[\"{name}\"]'"
        chance = format_chance(results["chance"])
        paragraphs += [f"### {escape(name)} (chance {chance})", checkpoint_line(run, results, command)]
        paragraphs.append(_table(name, results["cells"]))
    return "\n\n".join(paragraphs)


def gain_chart(found: Mapping[str, dict[str, Any]]) -> Chart:
    """The gain from the useful context by length, a line for each task; rows have the scores of all cells."""
    figure, axes = new_figure(7, 3.6)
    rows = []
    for name, results in found.items():
        cells, key = results["cells"], "gain_over_control"
        lengths, gains = [cell["length"] for cell in cells], [cell[key] for cell in cells]
        errors = [cell[f"{key}_standard_error"] or 0 for cell in cells]
        axes.errorbar(lengths, gains, errors, marker=".", capsize=2, label=name.split("@")[0])
        rows += [
            [name, cell["length"], cell["samples"], cell[key], cell[f"{key}_standard_error"]]
            + [cell.get(prefix + column, "") for column in COLUMNS for prefix in ("", "control_")]
            for cell in cells
        ]
    axes.axhline(0, color="black", linewidth=0.8)
    position_axis(axes, "length (tokens)")
    axes.set_ylabel("gain (nats per token)")
    axes.legend()
    header = ["task", "length (tokens)", "examples", "gain (nats/token)", "standard error (nats/token)"]
    header += [f"{name}{control}" for name in COLUMNS for control in ("", ", control")]
    return Chart(figure, header, rows)


def _table(name: str, cells: list[dict[str, Any]]) -> str:
    facts = [key for key in FACTS if key in cells[0]]
    scores = [key for key in SHOWN[name] if key in cells[0]]
    gains = [key for key in cells[0] if key.startswith("gain_over_") and not key.endswith("_error")]

    def score(cell: dict[str, Any], key: str) -> str:
        form = ".3f" if key == "nats_per_token" else ".1%"
        return f"{with_error(cell[key], cell[f'{key}_standard_error'], form)} ({cell[f'control_{key}']:{form}})"

    header = (
        "length",
        *facts,
        "examples",
        *[COLUMNS[key] for key in scores],
        *[key.replace("_", " ") for key in gains],
    )
    rows = [
        (
            f"{cell['length']:,}", *[f"{cell[key]:,}" for key in facts], f"{cell['samples']:,}",
            *[score(cell, key) for key in scores],
            *[with_error(cell[key], cell[f"{key}_standard_error"], "+.3f") for key in gains],
        )
        for cell in cells
    ]  # fmt: skip
    return table(header, rows)
