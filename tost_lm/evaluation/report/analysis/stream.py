"""Report section: frequent and rare tokens in the residual stream, and tokens with large norms."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

from tost_lm.evaluation.report.analysis.layers import LIGHTEST, SHAPES, number_ticks
from tost_lm.evaluation.report.analysis.section import analysis_section
from tost_lm.evaluation.report.analysis.tokens import visible
from tost_lm.evaluation.report.charts import Chart, line_data, log_value_axis
from tost_lm.evaluation.report.page import Page
from tost_lm.evaluation.subject import STREAM
from tost_lm.markdown import table

PANELS = {
    "update": "relative update by the branch",
    "concentration": "concentration of memberships",
    "kept": "cosine with the first layer's input",
}


@analysis_section("Residual stream", STREAM)
def stream(results: dict[str, Any], page: Page) -> list[str]:
    """Statistics by unigram information, and token norms."""
    rows = [
        (
            str(number),
            f"{layer['median']:.3g}",
            f"{layer['long_share']:.2%}",
            " · ".join(f"“{visible(t['text'])}” at {t['position']:,}: {t['medians']:.1f}" for t in layer["longest"]),
        )
        for number, layer in enumerate(results["layers"], 1)
    ]
    return [
        page.add_figure("stream", information_chart(results["groups"]), "Frequent and rare tokens by layer"),
        "Means over groups of tokens of about the same size, by unigram information: −ln of the token's relative "
        "frequency in the held-out text. The relative update is the norm of the branch's output divided by that of the "
        "residual stream before it.",
        table(
            (
                "TSSA layer",
                "median norm",
                f"norm above {results['long_medians']:g} medians",
                "largest norms (token, position, norm / median)",
            ),
            rows,
        ),
        "Euclidean norms of the tokens in the residual stream before each layer.",
    ]


def information_chart(groups: Sequence[Mapping[str, Any]]) -> Chart:
    """Statistics by layer, a line for each group of tokens."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    panels = figure.subplots(1, len(PANELS))
    numbers = list(range(1, 1 + len(groups[0]["update"])))
    lines = {}
    for axes, (key, label) in zip(panels, PANELS.items(), strict=True):
        for i, group in enumerate(groups):
            name = f"{group['from_nats']:.1f} to {group['to_nats']:.1f} nats"
            colour = colormaps["cividis"](LIGHTEST * i / max(len(groups) - 1, 1))
            axes.plot(numbers, group[key], color=colour, marker=SHAPES[i % len(SHAPES)], markersize=4, label=name)
            lines[f"{label}, group {i + 1}, {name} (1)"] = (numbers, group[key])
        number_ticks(axes.xaxis, len(numbers), 1)
        axes.set_xlabel("TSSA layer")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    log_value_axis(panels[0])
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return Chart(figure, **line_data("TSSA layer", lines))
