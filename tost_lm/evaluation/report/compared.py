"""The figures of several runs: a mean line with a band of its standard error for each group."""

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tost_lm.evaluation.report.charts import Chart, joined, marker
from tost_lm.evaluation.report.curves import position_axis
from tost_lm.evaluation.report.groups import Curve

COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000"]  # of Okabe and Ito
DASHES = ["-", "--", ":", "-."]


def step_chart(curves: Mapping[str, Curve], what: str) -> Chart:
    """A loss, named `what`, by step; the curves by the groups' labels."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    lines = _draw(axes, curves)
    axes.set_xlabel("steps")
    axes.set_ylabel(f"{what} (nats per token)")
    axes.grid(alpha=0.3)
    return Chart(figure, **joined("step", lines))


def position_curves_chart(curves: Mapping[str, Curve]) -> Chart:
    """The validation loss by position in the document."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    lines = _draw(axes, curves)
    position_axis(axes)
    return Chart(figure, **joined("positions up to (tokens)", lines))


def _draw(axes: Axes, curves: Mapping[str, Curve]) -> dict[str, Any]:
    lines: dict[str, Any] = {}
    for i, (label, curve) in enumerate(curves.items()):
        colour, dashes = COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)]
        axes.plot(
            curve.xs, curve.mean, color=colour, linestyle=dashes, linewidth=1.5, marker=marker(len(curve.xs)),
            markersize=4, label=label,
        )  # fmt: skip
        lines[f"{label}: mean (nats/token)"] = (curve.xs, curve.mean.tolist())
        if curve.error is not None:
            low, high = curve.mean - curve.error, curve.mean + curve.error
            axes.fill_between(curve.xs, low, high, color=colour, alpha=0.2, linewidth=0)
            lines[f"{label}: standard error (nats/token)"] = (curve.xs, curve.error.tolist())
    for text in axes.legend(fontsize="small").get_texts():
        text.set_parse_math(False)  # a path may hold $
    return lines
