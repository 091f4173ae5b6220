"""The sections of a run's report about its training: losses, optimizer, speed, and what happened."""

import math
from typing import Any

import numpy as np

from tost_lm.evaluation.report.charts import column
from tost_lm.evaluation.report.curves import loss_chart, optimizer_chart, position_chart
from tost_lm.evaluation.report.markdown import table
from tost_lm.evaluation.report.page import Page
from tost_lm.evaluation.report.protocols import missing
from tost_lm.evaluation.report.record import RunRecord

EVENTS_SHOWN = 50
RATES = {
    "tokens_per_second": ("tokens/s", 1, ",.0f"),
    "tokens_per_second_device": ("tokens/s a device", 1, ",.0f"),
    "tflops_device": ("TFLOP/s a device", 1, ",.4g"),
    "mfu": ("share of the device's peak (MFU)", 1, ".1%"),
    "memory_peak_bytes": ("memory peak (GB)", 1e-9, ",.2f"),
}


def losses(run: RunRecord, page: Page) -> str:
    """The loss curves."""
    if not run.metrics:
        return f"## Loss\n\n{missing('pretrain.train', 'configs/pretrain/NAME.toml')}"
    picture = page.show(
        "loss", loss_chart(run.metrics, run.validation), "Training and validation loss in nats per token by step"
    )
    last = run.metrics[-1]
    parts = [
        "## Loss",
        picture,
        f"Last logged: {_nats(last['loss'])} at step {last['step']:,}.",
    ]
    if run.validation:
        last = run.validation[-1]
        best = min(run.validation, key=lambda row: math.inf if row["loss"] is None else row["loss"])
        parts.append(
            f"Validation, on {last['tokens']:,} held-out tokens: last {_nats(last['loss'])} at step {last['step']:,}, "
            f"lowest {_nats(best['loss'])} at step {best['step']:,}."
        )
    return "\n\n".join(parts)


def positions(run: RunRecord, page: Page) -> str:
    """The validation loss by position."""
    if not run.validation:
        return ""
    picture = page.show(
        "position", position_chart(run.validation), "Validation loss in nats per token by position in the document"
    )
    return f"## Loss by position\n\n{picture}\n\nA model that uses what it has read falls to the right."


def optimizer(run: RunRecord, page: Page) -> str:
    """Learning rate and gradient norm."""
    if np.isnan([column(run.metrics, key) for key in ("lr", "grad_norm")]).all():
        return ""
    picture = page.show("optimizer", optimizer_chart(run.metrics), "Learning rate and gradient norm by step")
    return f"## Learning rate and gradient norm\n\n{picture}"


def speed(run: RunRecord) -> str:
    """What was done in a second, and the memory it took."""
    rows = []
    for key, (name, scale, form) in RATES.items():
        values = column(run.metrics, key) * scale
        values = values[np.isfinite(values)]
        if len(values):
            rows.append((name, *[f"{value:{form}}" for value in (np.median(values), values.min(), values.max())]))
    if not rows:
        return ""
    return f"## Speed\n\n{table(('', 'median', 'lowest', 'highest'), rows)}\n\nOver the rows of metrics.jsonl."


def events(run: RunRecord) -> str:
    """Skipped steps, resumes and early leaves."""
    told = [row for row in run.events if row["event"] in ("skipped", "resumed", "left")]
    if not told:
        return ""
    counts = {name: sum(row["event"] == name for row in told) for name in ("skipped", "resumed", "left")}
    parts = [
        "## Events",
        f"Steps skipped: {counts['skipped']:,}; resumed: {counts['resumed']:,}; left early: {counts['left']:,}.",
        table(
            ("step", "event", "what is known of it"),
            [(f"{row['step']:,}", row["event"], _details(row)) for row in told[-EVENTS_SHOWN:]],
        ),
    ]
    if len(told) > EVENTS_SHOWN:
        parts.append(f"These are the last {EVENTS_SHOWN} of {len(told):,}; events.jsonl holds all.")
    return "\n\n".join(parts)


def _details(event: dict[str, Any]) -> str:
    parts = []
    for key, value in event.items():
        if key == "samples":
            parts.append(f"samples {value[0]:,}–{value[1]:,}")
        elif key == "why":
            parts.insert(0, str(value))
        elif key not in ("step", "event", "time"):
            parts.append(f"{key.replace('_', ' ')} {value}")
    return "; ".join(parts)


def _nats(loss: float | None) -> str:
    return "not a number" if loss is None else f"{loss:.4f} nats per token"
