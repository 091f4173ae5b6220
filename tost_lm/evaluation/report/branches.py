"""Report section about the branches of a run."""

from typing import Any

from tost_lm.evaluation.report.comparison_charts import step_chart
from tost_lm.evaluation.report.groups import mean_curve
from tost_lm.evaluation.report.page import Page
from tost_lm.evaluation.report.record import RunRecord
from tost_lm.markdown import table

HEADER = ("run", "branches after step", "steps", "schedule", "data", "last training loss", "last validation loss")


def branches(trunk: RunRecord, page: Page) -> str:
    """The run and its branches with their losses; empty if it has none."""
    if not (found := trunk.branches()):
        return ""
    runs = {run.folder.resolve().name: run for run in (trunk, *found)}
    paragraphs = ["## Branches", table(HEADER, [_cells(name, run) for name, run in runs.items()])]
    kind = "validation" if all(run.validation for run in runs.values()) else "training"
    rows = {name: run.validation if kind == "validation" else run.metrics for name, run in runs.items()}
    if curves := {name: mean_curve([logged], "loss") for name, logged in rows.items() if logged}:
        chart = step_chart(curves, f"{kind} loss")
        paragraphs.append(page.add_figure("branches", chart, f"Loss of the run and its branches by step ({kind})"))
    return "\n\n".join(paragraphs)


def _cells(name: str, run: RunRecord) -> tuple[str, ...]:
    optim = run.config.get("optim", {})
    schedule = optim.get("schedule", "cosine")
    if "decay_steps" in optim:
        schedule += f", the last {optim['decay_steps']:,} steps decay"
    branch = run.branch
    last = run.metrics[-1]["step"] if run.metrics else 0
    return (
        name,
        f"{branch['step']:,}" if branch else "–",
        f"{last:,} of {run.config['train']['steps']:,}",
        schedule,
        f"{_shards(run)}, {branch['data']}" if branch else _shards(run),
        *[_last_loss(rows) for rows in (run.metrics, run.validation)],
    )


def _shards(run: RunRecord) -> str:
    data = run.config["data"]
    weights = data.get("mixture", {})
    return data["folder"] if not weights else ", ".join(f"{weight:g} × {folder}" for folder, weight in weights.items())


def _last_loss(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "–"
    loss = rows[-1]["loss"]
    return "NaN" if loss is None else f"{loss:.4f}"
