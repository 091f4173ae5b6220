"""Report sections about training: losses, optimizer, throughput, events."""

import math
from typing import Any

import numpy as np

from tost_lm.evaluation.report.charts import column
from tost_lm.evaluation.report.curves import loss_chart, optimizer_chart, position_chart
from tost_lm.evaluation.report.page import Page
from tost_lm.evaluation.report.protocols import missing_line
from tost_lm.evaluation.report.record import RunRecord
from tost_lm.markdown import table

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
    """Loss curves."""
    if not run.metrics:
        return f"## Loss\n\n{missing_line('tost train', 'configs/pretrain/NAME.toml')}"
    picture = page.add_figure("loss", loss_chart(run.metrics, run.validation), "Training and validation loss by step")
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
    picture = page.add_figure("optimizer", optimizer_chart(run.metrics), "Learning rate and gradient norm by step")
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
