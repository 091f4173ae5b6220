"""Report sections and figures about training, of one run or of groups of runs: losses and events.

In figures of several runs, the mean of each group has a band of one standard error.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tost_lm.data.stages import StageRecord
from tost_lm.markdown import table, with_error
from tost_lm.page import POSITION, Chart, Page, line_data, marker, new_figure, position_axis, step_axis
from tost_lm.report.record import Curve, RunRecord, curve, loss_curve

EVENTS = {"skipped": "skipped step", "resumed": "resumed", "stopped": "stopped early"}
EVENTS_SHOWN = 50
EARLIER_MEASUREMENTS = 3
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000"]  # Okabe and Ito
DASHES = ["-", "--", ":", "-."]


def losses(run: RunRecord, page: Page, stages: Sequence[StageRecord]) -> str:
    """Training and validation loss by step; empty before the first."""
    records = {"training": run.metrics, "validation": run.validation}
    curves = {name: loss_curve([rows]) for name, rows in records.items() if rows}
    return loss_section("Loss", "loss", curves, page, stages)


def positions(run: RunRecord, page: Page) -> str:
    """Validation loss by position: the last measurement and some earlier ones."""
    chosen = np.unique(np.linspace(0, len(run.validation) - 1, EARLIER_MEASUREMENTS + 1).round().astype(int))
    rows = [run.validation[number] for number in chosen] if run.validation else []
    curves = {f"step {row['step']:,}": position_curve([row]) for row in rows}
    return position_section(curves, page)


def loss_section(
    name: str, file: str, curves: Mapping[str, Curve], page: Page, stages: Sequence[StageRecord] = ()
) -> str:
    """Losses by step; empty if no curve has a step."""
    drawn = {label: line for label, line in curves.items() if line.xs}
    if not drawn:
        return ""
    figure, axes = new_figure(7, 4.2)
    lines = _draw(axes, drawn)
    step_axis(axes)
    for stage in stages[1:]:  # where it begins
        axes.axvline(stage.first_step, color="gray", linewidth=0.8, linestyle=":")
        point = {"xycoords": axes.get_xaxis_transform(), "xytext": (3, 0), "textcoords": "offset points"}
        axes.annotate(stage.name, (stage.first_step, 0.98), **point, rotation=90, va="top", fontsize=8, color="gray")
    axes.set_ylabel(f"{name.lower()} (nats per token)")
    return f"## {name}\n\n{page.add_figure(file, Chart(figure, **line_data('step', lines)), f'{name} by step')}"


def position_curve(rows: Sequence[Mapping[str, Any]]) -> Curve:
    """The mean over measurements of the loss by position."""
    return curve(rows[0]["position_ends"], np.array([row["loss_by_position"] for row in rows], dtype=float))


def position_section(curves: Mapping[str, Curve], page: Page) -> str:
    """Validation losses by position in the document; empty without a curve."""
    if not curves:
        return ""
    figure, axes = new_figure(7, 4.2)
    lines = _draw(axes, curves)
    position_axis(axes, POSITION)
    axes.set_ylabel("validation loss (nats per token)")
    chart = Chart(figure, **line_data("positions up to (tokens)", lines))
    ends = sorted({end for line in curves.values() for end in line.xs})
    rows = [(label, *[_at(line, end, ".3f") for end in ends]) for label, line in curves.items()]
    return "\n\n".join([
        "## Loss by position",
        page.add_figure("position", chart, "Validation loss by position in the document"),
        table(("validation loss", *[f"positions up to {end:,}" for end in ends]), rows),
        "The loss falls with the position where the model uses its context.",
    ])  # fmt: skip


def _draw(axes: Any, curves: Mapping[str, Curve]) -> dict[str, Any]:
    lines: dict[str, Any] = {}
    for i, (label, line) in enumerate(curves.items()):
        colour, dashes = COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)]
        axes.plot(
            line.xs, line.mean, color=colour, linestyle=dashes, linewidth=1.5, marker=marker(len(line.xs)),
            markersize=4, label=label,
        )  # fmt: skip
        lines[f"{label}: mean (nats/token)"] = (line.xs, line.mean.tolist())
        if line.error is not None:
            low, high = line.mean - line.error, line.mean + line.error
            axes.fill_between(line.xs, low, high, color=colour, alpha=0.2, linewidth=0)
            lines[f"{label}: standard error (nats/token)"] = (line.xs, line.error.tolist())
    for text in axes.legend(fontsize="small").get_texts():
        text.set_parse_math(False)  # a path may hold $
    return lines


def _at(line: Curve, x: int, form: str) -> str:
    if x not in line.xs:
        return "–"
    i = line.xs.index(x)
    return with_error(line.mean[i], None if line.error is None else line.error[i], form)


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
