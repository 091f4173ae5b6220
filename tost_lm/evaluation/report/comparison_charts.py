"""Figures of several runs: the mean of each group with a band of one standard error."""

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes

from tost_lm.evaluation.report.charts import Chart, line_data, marker, new_figure, position_axis, step_axis
from tost_lm.evaluation.report.curves import POSITION
from tost_lm.evaluation.report.groups import Curve

COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000"]  # Okabe and Ito
DASHES = ["-", "--", ":", "-."]


def step_chart(curves: Mapping[str, Curve], name: str) -> Chart:
    """The loss `name` by step; curves by the groups' labels."""
    figure, axes = new_figure(7, 4.2)
    lines = _draw(axes, curves)
    step_axis(axes)
    axes.set_ylabel(f"{name} (nats per token)")
    return Chart(figure, **line_data("step", lines))


def position_curves_chart(curves: Mapping[str, Curve]) -> Chart:
    """Validation loss by position in the document."""
    figure, axes = new_figure(7, 4.2)
    lines = _draw(axes, curves)
    position_axis(axes, POSITION)
    axes.set_ylabel("validation loss (nats per token)")
    return Chart(figure, **line_data("positions up to (tokens)", lines))


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
