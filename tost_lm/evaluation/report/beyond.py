"""The section of a run's report about positions beyond the trained length."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from tost_lm.evaluation.positions_config import POSITIONS
from tost_lm.evaluation.report.charts import Chart, column, joined
from tost_lm.evaluation.report.curves import CONTRAST, DARK, position_axis
from tost_lm.evaluation.report.markdown import escape, table
from tost_lm.evaluation.report.page import Page
from tost_lm.evaluation.report.protocols import missing, of_checkpoint
from tost_lm.evaluation.report.record import Evaluated


def beyond(run: Evaluated, page: Page) -> str:
    """The loss by position up to many times the trained length."""
    results = run.results(POSITIONS)
    if results is None:
        return f"## Beyond the trained length\n\n{missing('eval.positions', run.with_text)}"
    rows, trained, sequences = results["by_position"], results["trained_tokens"], results["sequences"]
    parts = [
        f"## Beyond the trained length ({escape(POSITIONS)})",
        of_checkpoint(run, results, f"eval.positions {run.with_text}"),
        page.show("beyond", beyond_chart(rows, trained), "Loss by position up to and beyond the trained length"),
        table(
            ("positions up to", "nats per token", "± standard error", ""),
            [
                (f"{row['end']:,}", f"{row['nats_per_token']:.4f}", _error(row), "" if row["trained"] else "beyond")
                for row in rows
            ],
        ),
        f"Held-out documents one after another, {sequences:,} {'sequences' if sequences > 1 else 'sequence'} of "
        f"{rows[-1]['end']:,} tokens, each read as one stream; the run was trained on sequences of {trained:,} tokens. "
        "± is the standard error over the sequences. Stretches hold different text, so they differ for that, too.",
    ]
    if results["position_limit"]:
        parts.append(f"The model has learned {results['position_limit']:,} positions and reads no further.")
    return "\n\n".join(parts)


def beyond_chart(rows: Sequence[dict[str, Any]], trained: int) -> Chart:
    """Solid up to the trained length, dashed behind it, in a band of one standard error to each side."""
    ends = [row["end"] for row in rows]
    nats, errors = column(rows, "nats_per_token"), column(rows, "standard_error")
    known = sum(row["trained"] for row in rows)
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot()
    if known:
        axes.plot(ends[:known], nats[:known], color=DARK, linewidth=2, marker=".", label="trained positions")
    if known < len(rows):
        behind = slice(max(0, known - 1), None)  # joined to the line before it
        axes.plot(ends[behind], nats[behind], color=DARK, linewidth=2, linestyle="--", marker=".", label="beyond them")
        axes.axvspan(trained, ends[-1], color=CONTRAST, alpha=0.1, linewidth=0)
    if np.isfinite(errors).all():
        axes.fill_between(
            ends, nats - errors, nats + errors, color=DARK, alpha=0.2, linewidth=0, label="± standard error"
        )
    if trained <= ends[-1]:
        axes.axvline(trained, color=CONTRAST, linewidth=1.5, label=f"trained length, {trained:,} tokens")
    position_axis(axes)
    axes.set_xlabel("position in the sequence (tokens): up to the mark, after the one before")
    axes.set_ylabel("loss (nats per token)")
    axes.legend()
    lines = {
        "loss (nats/token)": (ends, nats.tolist()),
        "standard error (nats/token)": (ends, ["" if np.isnan(error) else float(error) for error in errors]),
        "trained (1 yes, 0 no)": (ends, [int(row["trained"]) for row in rows]),
    }
    return Chart(figure, **joined("positions up to (tokens)", lines))


def _error(row: dict[str, Any]) -> str:
    return "–" if row["standard_error"] is None else f"{row['standard_error']:.4f}"
