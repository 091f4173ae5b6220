"""The section of a run's report about tokens in the residual stream: rare ones through the layers, and long ones."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

from tost_lm.evaluation.report.analysis.layers import LIGHTEST, SHAPES, number_ticks
from tost_lm.evaluation.report.analysis.tokens import shown
from tost_lm.evaluation.report.charts import Chart, joined
from tost_lm.evaluation.report.markdown import escape, table
from tost_lm.evaluation.report.page import Page
from tost_lm.evaluation.report.protocols import of_checkpoint
from tost_lm.evaluation.report.record import Evaluated
from tost_lm.evaluation.subject import STREAM

FIGURES = {
    "update": "update by the branch / residual stream",
    "concentration": "concentration of memberships",
    "kept": "cosine with the first layer's stream",
}


def stream(run: Evaluated, page: Page) -> str:
    """What becomes of rare tokens, and which are long; empty without results."""
    results = run.results(STREAM)
    if results is None:
        return ""
    rows = [
        (
            str(number),
            f"{layer['median']:.3g}",
            f"{layer['long_share']:.2%}",
            " · ".join(f"{shown(t['text'])} at {t['position']:,}: {t['medians']:.1f}" for t in layer["longest"]),
        )
        for number, layer in enumerate(results["layers"], 1)
    ]
    return "\n\n".join([
        f"## Residual stream ({escape(STREAM)})",
        of_checkpoint(run, results, f"eval.analyze {run.with_text}"),
        page.show("stream", follow_chart(results["groups"]), "Rare and frequent tokens through the layers"),
        "Tokens in groups of about one size by what their word tells by itself, −ln of its share of the held-out text; "
        "means over a group.",
        table(
            ("TSSA layer", "median length", f"longer than {results['long_medians']:g} medians",
             "longest: token, position, medians"),
            rows,
        ),
        "Euclidean lengths of tokens in the residual stream before each layer.",
    ])  # fmt: skip


def follow_chart(groups: Sequence[Mapping[str, Any]]) -> Chart:
    """By layer, a line for each group of tokens."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    panels = figure.subplots(1, len(FIGURES))
    numbers = list(range(1, 1 + len(groups[0]["update"])))
    lines = {}
    for axes, (key, label) in zip(panels, FIGURES.items(), strict=True):
        for place, group in enumerate(groups):
            name = f"{group['from_nats']:.1f} to {group['to_nats']:.1f} nats"
            colour = colormaps["cividis"](LIGHTEST * place / max(len(groups) - 1, 1))
            axes.plot(numbers, group[key], color=colour, marker=SHAPES[place % len(SHAPES)], markersize=4, label=name)
            lines[f"{label}, group {place + 1}, words of {name} (1)"] = (numbers, group[key])
        number_ticks(axes.xaxis, len(numbers), 1)
        axes.set_xlabel("TSSA layer")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    panels[0].set_yscale("log")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return Chart(figure, **joined("TSSA layer", lines))
