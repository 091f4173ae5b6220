"""Training and validation figures of one run."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from tost_lm.evaluation.report.charts import (
    Chart,
    column,
    line_data,
    log_value_axis,
    marker,
    new_figure,
    position_axis,
    step_axis,
)

LIGHT, DARK, CONTRAST = "#8fb4d9", "#0b3c6f", "#c77700"
EARLIER_MEASUREMENTS = 3
POSITION = "position in the document (tokens, end of the bin)"


def loss_chart(metrics: Sequence[dict[str, Any]], validation: Sequence[dict[str, Any]]) -> Chart:
    """Training loss by step, logged and smoothed, and validation loss."""
    steps, losses = [row["step"] for row in metrics], column(metrics, "loss")
    smoothed = _smoothed(losses)
    lines = {
        "training loss as logged (nats/token)": (steps, losses.tolist()),
        "training loss smoothed (nats/token)": (steps, smoothed.tolist()),
    }
    figure, axes = new_figure(7, 3.6)
    axes.plot(steps, losses, color=LIGHT, linewidth=1.2, marker=marker(len(steps)), markersize=4, label="training")
    axes.plot(
        steps, smoothed, color=DARK, linewidth=2, marker=marker(len(steps)), markersize=1, label="training, smoothed"
    )
    if validation:
        measured, held_out = [row["step"] for row in validation], column(validation, "loss")
        lines["validation loss (nats/token)"] = (measured, held_out.tolist())
        axes.plot(measured, held_out, color=CONTRAST, linewidth=2, marker=marker(len(measured)), label="validation")
    step_axis(axes)
    axes.set_ylabel("loss (nats per token)")
    axes.legend()
    return Chart(figure, **line_data("step", lines))


def position_chart(validation: Sequence[dict[str, Any]]) -> Chart:
    """Validation loss by position in the document: the last measurement and some earlier ones."""
    chosen = np.unique(np.linspace(0, len(validation) - 1, EARLIER_MEASUREMENTS + 1).round().astype(int))
    figure, axes = new_figure(7, 3.6)
    lines = {}
    for i, number in enumerate(chosen, start=1):
        row = validation[number]
        losses = np.array(row["loss_by_position"], dtype=float)
        lines[f"loss after step {row['step']} (nats/token)"] = (row["position_ends"], losses.tolist())
        colour = colormaps["Blues"](i / len(chosen))
        axes.plot(row["position_ends"], losses, color=colour, marker=".", label=f"after step {row['step']:,}")
    position_axis(axes, POSITION)
    axes.set_ylabel("validation loss (nats per token)")
    figure.legend(loc="outside right center")
    return Chart(figure, **line_data("positions up to (tokens)", lines))


def optimizer_chart(metrics: Sequence[dict[str, Any]]) -> Chart:
    """Learning rate and gradient norm by step."""
    steps = [row["step"] for row in metrics]
    rates, norms = column(metrics, "lr"), column(metrics, "grad_norm")
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    top.plot(steps, rates, color=DARK, marker=marker(len(steps)), markersize=4)
    top.grid(alpha=0.3)
    top.set_ylabel("learning rate")
    bottom.plot(steps, norms, color=DARK, linewidth=1, marker=marker(len(steps)), markersize=4)
    bottom.set_ylabel("gradient norm")
    step_axis(bottom)
    if (norms > 0).any():
        log_value_axis(bottom)
    lines = {"learning rate (1)": (steps, rates.tolist()), "gradient norm (1)": (steps, norms.tolist())}
    return Chart(figure, **line_data("step", lines))


def _smoothed(values: np.ndarray) -> np.ndarray:
    """Centred mean over up to a tenth of the finite values; narrower at the ends, so that the curve does not lag."""
    finite, here = np.isfinite(values), np.arange(len(values))
    near = np.minimum(max(1, len(values) // 20), np.minimum(here, here[::-1]))
    first, end = here - near, here + near + 1
    # Each window has a sum of its own: after a huge loss, differences of running sums would be noise.
    filled = np.append(np.where(finite, values, 0.0), 0.0)
    sums = np.add.reduceat(filled, np.stack([first, end], axis=1).ravel())[::2]
    counts = np.diff(np.append(0, np.cumsum(finite))[[first, end]], axis=0)[0]
    return np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0)
