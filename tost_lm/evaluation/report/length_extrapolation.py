"""Section of a run's report: loss by position beyond the trained length."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tost_lm.evaluation.config import POSITIONS
from tost_lm.evaluation.report.charts import Chart, column, line_data, new_figure, position_axis
from tost_lm.evaluation.report.curves import CONTRAST, DARK
from tost_lm.evaluation.report.page import Page
from tost_lm.evaluation.report.protocols import checkpoint_line, missing_line
from tost_lm.evaluation.report.record import EvaluatedModel
from tost_lm.markdown import escape, table


def length_extrapolation(run: EvaluatedModel, page: Page) -> str:
    """Loss by position up to a multiple of the trained length."""
    results = run.results(POSITIONS)
    if results is None:
        return f"## Length extrapolation\n\n{missing_line('tost eval positions', run.arguments)}"
    rows, trained, sequences = results["by_position"], results["trained_tokens"], results["sequences"]
    limit = results["position_limit"]
    errors = ["–" if row["standard_error"] is None else f"{row['standard_error']:.4f}" for row in rows]
    return "\n\n".join([
        f"## Length extrapolation ({escape(POSITIONS)})",
        checkpoint_line(run, results, f"tost eval positions {run.arguments}"),
        page.add_figure("length_extrapolation", extrapolation_chart(rows, trained), "Loss by position"),
        table(
            ("positions up to", "nats per token", "standard error", "trained length"),
            [
                (f"{row['end']:,}", f"{row['nats_per_token']:.4f}", error, "within" if row["trained"] else "beyond")
                for row, error in zip(rows, errors, strict=True)
            ],
        ),
        f"{sequences:,} {'sequences' if sequences > 1 else 'sequence'} of {rows[-1]['end']:,} tokens of concatenated "
        f"held-out documents, each evaluated as one stream. The trained sequence length is {trained:,} tokens. The "
        "standard error is over the sequences. Each position range has different text, which also changes the loss."
        + (f" The model has {limit:,} learned positions, so sequences are no longer than that." if limit else ""),
    ])  # fmt: skip


def extrapolation_chart(rows: Sequence[dict[str, Any]], trained: int) -> Chart:
    """Solid up to the trained length, dashed beyond, with a band of one standard error."""
    ends = [row["end"] for row in rows]
    nats, errors = column(rows, "nats_per_token"), column(rows, "standard_error")
    known = sum(row["trained"] for row in rows)
    figure, axes = new_figure(7, 3.6)
    if known:
        axes.plot(ends[:known], nats[:known], color=DARK, linewidth=2, marker=".", label="within the trained length")
    if known < len(rows):
        beyond = slice(max(0, known - 1), None)  # starts at the end of the solid line
        axes.plot(ends[beyond], nats[beyond], color=DARK, linewidth=2, linestyle="--", marker=".", label="beyond it")
        axes.axvspan(trained, ends[-1], color=CONTRAST, alpha=0.1, linewidth=0)
    if np.isfinite(errors).all():
        axes.fill_between(
            ends, nats - errors, nats + errors, color=DARK, alpha=0.2, linewidth=0, label="± standard error"
        )
    if trained <= ends[-1]:
        axes.axvline(trained, color=CONTRAST, linewidth=1.5, label=f"trained length, {trained:,} tokens")
    position_axis(axes, "position in the sequence (tokens, end of the bin)")
    axes.set_ylabel("loss (nats per token)")
    axes.legend()
    lines = {
        "loss (nats/token)": (ends, nats.tolist()),
        "standard error (nats/token)": (ends, ["" if np.isnan(error) else float(error) for error in errors]),
        "trained (1 yes, 0 no)": (ends, [int(row["trained"]) for row in rows]),
    }
    return Chart(figure, **line_data("positions up to (tokens)", lines))
