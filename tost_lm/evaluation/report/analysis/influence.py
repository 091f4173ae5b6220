"""The section of a run's report about how far one swapped token reaches."""

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from tost_lm.evaluation.report.analysis.layers import doubling_axis, draw_layers, name_layers, of_layers
from tost_lm.evaluation.report.charts import Chart, joined
from tost_lm.evaluation.report.markdown import escape, table
from tost_lm.evaluation.report.page import Page
from tost_lm.evaluation.report.protocols import of_checkpoint
from tost_lm.evaluation.report.record import Evaluated
from tost_lm.evaluation.subject import INFLUENCE


def influence(run: Evaluated, page: Page) -> str:
    """By distance, of each layer; empty without results."""
    results = run.results(INFLUENCE)
    if results is None:
        return ""
    layers = [f"TSSA layer {number}" for number in range(1, 1 + len(results["mean"]))]
    by_distance = zip(results["distance_ends"], *_told(results), strict=True)
    return "\n\n".join([
        f"## Influence of one token ({escape(INFLUENCE)})",
        of_checkpoint(run, results, f"eval.analyze {run.with_text}"),
        page.show("influence", influence_chart(results), "How far a layer's output moves when one token is swapped"),
        f"‖y′ − y‖ / ‖y‖ of what a layer gives, with one token before swapped for another, over {results['swaps']} "
        f"swaps in {results['sequences']} sequences (mean ± standard error over documents).",
        table(("tokens later, up to", *layers), [(f"{end:,}", *told) for end, *told in by_distance]),
    ])  # fmt: skip


def influence_chart(results: Mapping[str, Any]) -> Chart:
    """By distance, a line for each layer, both axes doubling."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot()
    ends, means = results["distance_ends"], results["mean"]
    draw_layers(axes, ends, means)
    doubling_axis(axes)
    axes.set_xlabel("tokens after the swapped one (up to the mark)")
    if all(value > 0 for line in means for value in line):
        axes.set_yscale("log")
    axes.set_ylabel("change of the output, relative to it")
    name_layers(figure, len(means))
    columns = of_layers(means, "relative change (1)")
    if results["standard_error"]:
        columns |= of_layers(results["standard_error"], "standard error (1)")
    return Chart(figure, **joined("tokens later, up to", {name: (ends, line) for name, line in columns.items()}))


def _told(results: Mapping[str, Any]) -> list[list[str]]:
    errors = results["standard_error"] or [[None] * len(line) for line in results["mean"]]
    return [
        [f"{value:.3g}" + ("" if error is None else f" ± {error:.1g}") for value, error in zip(*line, strict=True)]
        for line in zip(results["mean"], errors, strict=True)
    ]
