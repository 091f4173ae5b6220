"""The figures of one run."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from tost_lm.evaluation.report.charts import Chart, column, joined, marker

LIGHT, DARK, CONTRAST = "#8fb4d9", "#0b3c6f", "#c77700"
EARLIER_MEASUREMENTS = 3


def loss_chart(metrics: Sequence[dict[str, Any]], validation: Sequence[dict[str, Any]]) -> Chart:
    """Training loss by step, as logged and its running mean, and the validation loss where it was measured."""
    steps, losses = [row["step"] for row in metrics], column(metrics, "loss")
    smoothed = _smoothed(losses)
    lines = {
        "training loss as logged (nats/token)": (steps, losses.tolist()),
        "training loss smoothed (nats/token)": (steps, smoothed.tolist()),
    }
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, losses, color=LIGHT, linewidth=1.2, marker=marker(len(steps)), markersize=4, label="as logged")
    axes.plot(steps, smoothed, color=DARK, linewidth=2, marker=marker(len(steps)), markersize=1, label="smoothed")
    if validation:
        measured, held_out = [row["step"] for row in validation], column(validation, "loss")
        lines["validation loss (nats/token)"] = (measured, held_out.tolist())
        axes.plot(measured, held_out, color=CONTRAST, linewidth=2, marker=marker(len(measured)), label="validation")
    axes.set_xlabel("steps")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    return Chart(figure, **joined("step", lines))


def position_chart(validation: Sequence[dict[str, Any]]) -> Chart:
    """Validation loss by position in the document: the last measurement and a few earlier ones."""
    chosen = np.unique(np.linspace(0, len(validation) - 1, EARLIER_MEASUREMENTS + 1).round().astype(int))
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot()
    lines = {}
    for place, number in enumerate(chosen, start=1):
        row = validation[number]
        losses = np.array(row["loss_by_position"], dtype=float)
        lines[f"loss after step {row['step']} (nats/token)"] = (row["position_ends"], losses.tolist())
        colour = colormaps["Blues"](place / len(chosen))
        axes.plot(row["position_ends"], losses, color=colour, marker=".", label=f"after step {row['step']:,}")
    position_axis(axes)
    axes.legend()
    return Chart(figure, **joined("positions up to (tokens)", lines))


def position_axis(axes: Any) -> None:
    """Axes for a loss by position: stretches of positions double in length."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("position in the document (tokens): up to the mark, after the one before")
    axes.set_ylabel("validation loss (nats per token)")
    axes.grid(alpha=0.3)


def optimizer_chart(metrics: Sequence[dict[str, Any]]) -> Chart:
    """Learning rate and gradient norm by step."""
    steps = [row["step"] for row in metrics]
    rates, norms = column(metrics, "lr"), column(metrics, "grad_norm")
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    above.plot(steps, rates, color=DARK, marker=marker(len(steps)), markersize=4)
    above.set_ylabel("learning rate")
    below.plot(steps, norms, color=DARK, linewidth=1, marker=marker(len(steps)), markersize=4)
    below.set_ylabel("gradient norm")
    below.set_xlabel("steps")
    if (norms > 0).any():
        below.set_yscale("log")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    lines = {"learning rate (1)": (steps, rates.tolist()), "gradient norm (1)": (steps, norms.tolist())}
    return Chart(figure, **joined("step", lines))


def _smoothed(values: np.ndarray) -> np.ndarray:
    """Mean of up to a tenth of all values around each; fewer towards the ends, so that the curve does not lag.

    What is not finite is left out of it.
    """
    finite, here = np.isfinite(values), np.arange(len(values))
    near = np.minimum(max(1, len(values) // 20), np.minimum(here, here[::-1]))
    first, end = here - near, here + near + 1
    # Each window is summed by itself: after a huge loss, differences of running sums would be noise.
    filled = np.append(np.where(finite, values, 0.0), 0.0)
    sums = np.add.reduceat(filled, np.stack([first, end], axis=1).ravel())[::2]
    counts = np.diff(np.append(0, np.cumsum(finite))[[first, end]], axis=0)[0]
    return np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0)
