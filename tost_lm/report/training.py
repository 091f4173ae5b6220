"""Report sections and figures about the training of a run: losses, optimizer, throughput, events."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tost_lm.data.stages import StageRecord
from tost_lm.markdown import table
from tost_lm.page import (
    CONTRAST,
    DARK,
    LIGHT,
    POSITION,
    Chart,
    Page,
    column,
    line_data,
    log_value_axis,
    marker,
    new_figure,
    new_panels,
    position_axis,
    shade,
    step_axis,
)
from tost_lm.report.record import RunRecord

EVENTS = {"skipped": "skipped step", "resumed": "resumed", "stopped": "stopped early"}
EVENTS_SHOWN = 50
RATES = {
    "tokens_per_second": ("tokens/s", 1, ",.0f"),
    "tokens_per_second_device": ("tokens/s/device", 1, ",.0f"),
    "tflops_device": ("TFLOP/s/device", 1, ",.4g"),
    "mfu": ("model FLOP utilisation (MFU)", 1, ".1%"),
    "memory_peak_bytes": ("peak memory (GB)", 1e-9, ",.2f"),
}


def losses(run: RunRecord, page: Page) -> str:
    """Loss curves; empty before the first step."""
    if not run.metrics:
        return ""
    chart = loss_chart(run.metrics, run.validation, run.stages)
    picture = page.add_figure("loss", chart, "Training and validation loss by step")
    last = run.metrics[-1]
    paragraphs = ["## Loss", picture, f"Last training loss: {_nats(last['loss'])} at step {last['step']:,}."]
    if run.validation:
        last = run.validation[-1]
        best = min(run.validation, key=lambda row: math.inf if row["loss"] is None else row["loss"])
        paragraphs.append(
            f"Validation loss on {last['tokens']:,} held-out tokens: last {_nats(last['loss'])} at step "
            f"{last['step']:,}, lowest {_nats(best['loss'])} at step {best['step']:,}."
        )
    return "\n\n".join(paragraphs)


def positions(run: RunRecord, page: Page) -> str:
    """Validation loss by position."""
    if not run.validation:
        return ""
    picture = page.add_figure("position", position_chart(run.validation), "Validation loss by position in the document")
    return f"## Loss by position\n\n{picture}\n\nThe loss falls with the position where the model uses its context."


def optimizer(run: RunRecord, page: Page) -> str:
    """Learning rate and gradient norm."""
    if np.isnan([column(run.metrics, key) for key in ("lr", "grad_norm")]).all():
        return ""
    chart = optimizer_chart(run.metrics, run.stages)
    picture = page.add_figure("optimizer", chart, "Learning rate and gradient norm by step")
    return f"## Learning rate and gradient norm\n\n{picture}"


def throughput(run: RunRecord) -> str:
    """Throughput and memory over the logged rows."""
    rows = []
    for key, (name, scale, form) in RATES.items():
        values = column(run.metrics, key) * scale
        values = values[np.isfinite(values)]
        if len(values):
            rows.append((name, *[f"{value:{form}}" for value in (np.median(values), values.min(), values.max())]))
    if not rows:
        return ""
    statistics = table(("metric", "median", "lowest", "highest"), rows)
    return f"## Throughput and memory\n\n{statistics}\n\nOver the rows of `metrics.jsonl`."


def events(run: RunRecord) -> str:
    """Skipped steps, resumes and graceful stops."""
    listed = [row for row in run.events if row["event"] in EVENTS]
    if not listed:
        return ""
    counts = [f"{label}: {sum(row['event'] == name for row in listed):,}" for name, label in EVENTS.items()]
    rows = [(f"{row['step']:,}", EVENTS[row["event"]], _details(row)) for row in listed[-EVENTS_SHOWN:]]
    paragraphs = ["## Events", f"Number of events: {', '.join(counts)}.", table(("step", "event", "details"), rows)]
    if len(listed) > EVENTS_SHOWN:
        paragraphs.append(f"These are the last {EVENTS_SHOWN} of {len(listed):,} events; `events.jsonl` has all.")
    return "\n\n".join(paragraphs)


def _details(event: dict[str, Any]) -> str:
    details = []
    for key, value in event.items():
        if key == "samples":
            details.append(f"samples {value[0]:,}–{value[1]:,}")
        elif key == "why":
            details.insert(0, str(value))
        elif key not in ("step", "event", "time"):
            details.append(f"{key.replace('_', ' ')} {value}")
    return "; ".join(details)


def _nats(loss: float | None) -> str:
    return "NaN" if loss is None else f"{loss:.4f} nats per token"


EARLIER_MEASUREMENTS = 3


def loss_chart(
    metrics: Sequence[dict[str, Any]], validation: Sequence[dict[str, Any]], stages: Sequence[StageRecord] = ()
) -> Chart:
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
    mark_stages(axes, stages)
    axes.set_ylabel("loss (nats per token)")
    axes.legend()
    return Chart(figure, **line_data("step", lines))


def mark_stages(axes: Any, stages: Sequence[StageRecord]) -> None:
    """A line with the name of each stage but the first, where it begins."""
    for stage in stages[1:]:
        axes.axvline(stage.first_step, color="gray", linewidth=0.8, linestyle=":")
        point = {"xycoords": axes.get_xaxis_transform(), "xytext": (3, 0), "textcoords": "offset points"}
        axes.annotate(stage.name, (stage.first_step, 0.98), **point, rotation=90, va="top", fontsize=8, color="gray")


def position_chart(validation: Sequence[dict[str, Any]]) -> Chart:
    """Validation loss by position in the document: the last measurement and some earlier ones."""
    chosen = np.unique(np.linspace(0, len(validation) - 1, EARLIER_MEASUREMENTS + 1).round().astype(int))
    figure, axes = new_figure(7, 3.6)
    lines = {}
    for i, number in enumerate(chosen, start=1):
        row = validation[number]
        losses = np.array(row["loss_by_position"], dtype=float)
        lines[f"loss after step {row['step']} (nats/token)"] = (row["position_ends"], losses.tolist())
        colour = shade(i / len(chosen), "Blues")
        axes.plot(row["position_ends"], losses, color=colour, marker=".", label=f"after step {row['step']:,}")
    position_axis(axes, POSITION)
    axes.set_ylabel("validation loss (nats per token)")
    figure.legend(loc="outside right center")
    return Chart(figure, **line_data("positions up to (tokens)", lines))


def optimizer_chart(metrics: Sequence[dict[str, Any]], stages: Sequence[StageRecord] = ()) -> Chart:
    """Learning rate and gradient norm by step."""
    steps = [row["step"] for row in metrics]
    rates, norms = column(metrics, "lr"), column(metrics, "grad_norm")
    figure, (top, bottom) = new_panels(7, 4.2, 1, rows=2, sharex=True)
    top.plot(steps, rates, color=DARK, marker=marker(len(steps)), markersize=4)
    top.grid(alpha=0.3)
    top.set_ylabel("learning rate")
    bottom.plot(steps, norms, color=DARK, linewidth=1, marker=marker(len(steps)), markersize=4)
    bottom.set_ylabel("gradient norm")
    step_axis(bottom)
    mark_stages(top, stages)
    mark_stages(bottom, stages)
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
