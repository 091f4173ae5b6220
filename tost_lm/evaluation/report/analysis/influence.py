"""Report section: influence of one replaced token."""

from collections.abc import Mapping
from typing import Any

from tost_lm.evaluation.report.analysis.layers import add_layer_legend, draw_layers, layer_columns
from tost_lm.evaluation.report.analysis.section import analysis_section
from tost_lm.evaluation.report.charts import Chart, line_data, log_value_axis, new_figure, position_axis
from tost_lm.evaluation.report.page import Page
from tost_lm.evaluation.subject import INFLUENCE
from tost_lm.markdown import table, with_error


@analysis_section("Influence of one token", INFLUENCE)
def influence(results: dict[str, Any], page: Page) -> list[str]:
    """Influence by distance and layer."""
    errors = results["standard_error"] or [[None] * len(line) for line in results["mean"]]
    layers = [
        [with_error(value, error, "#.2g") for value, error in zip(*lines, strict=True)]
        for lines in zip(results["mean"], errors, strict=True)
    ]
    header = ("tokens later, up to", *[f"TSSA layer {number}" for number in range(1, 1 + len(layers))])
    return [
        page.add_figure("influence", influence_chart(results), "Change of a layer's output by distance"),
        f"Relative change ‖y′ − y‖ / ‖y‖ of a layer's output after one earlier token is replaced; mean over "
        f"{results['swaps']} replaced tokens in {results['sequences']} sequences ± standard error over documents.",
        table(header, [(f"{end:,}", *cells) for end, *cells in zip(results["distance_ends"], *layers, strict=True)]),
    ]


def influence_chart(results: Mapping[str, Any]) -> Chart:
    """Influence by distance, a line for each layer, both axes logarithmic."""
    figure, axes = new_figure(7, 3.6)
    ends, means = results["distance_ends"], results["mean"]
    draw_layers(axes, ends, means)
    position_axis(axes, "distance from the replaced token (tokens, end of the bin)")
    if all(value > 0 for line in means for value in line):
        log_value_axis(axes)
    axes.set_ylabel("relative change of the output")
    add_layer_legend(figure, len(means))
    columns = layer_columns(means, "relative change (1)")
    if results["standard_error"]:
        columns |= layer_columns(results["standard_error"], "standard error (1)")
    return Chart(figure, **line_data("tokens later, up to", {name: (ends, line) for name, line in columns.items()}))
