"""The section of a run's report about its loss with parts of the operator taken away."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from tost_lm.evaluation.report.charts import Chart
from tost_lm.evaluation.report.curves import DARK
from tost_lm.evaluation.report.markdown import escape, table
from tost_lm.evaluation.report.page import Page
from tost_lm.evaluation.report.protocols import of_checkpoint
from tost_lm.evaluation.report.record import Evaluated
from tost_lm.evaluation.subject import SWAPS


def swaps(run: Evaluated, page: Page) -> str:
    """Each loss beside that of the model as it is; empty without results."""
    results = run.results(SWAPS)
    if results is None:
        return ""
    rows = []
    for loss in results["losses"]:
        error = loss["standard_error"]
        change = f"{loss['change']:+.4f}" + ("" if error is None else f" ± {error:.4f}")
        rows.append((loss["name"], f"{loss['nats_per_token']:.4f}", change))
    return "\n\n".join([
        f"## Parts of the operator taken away ({escape(SWAPS)})",
        of_checkpoint(run, results, f"eval.analyze {run.with_text}"),
        page.show("swaps", swaps_chart(results["losses"]), "Loss with parts of the operator taken away"),
        table(("TSSA layers", "nats per token", "beside the model as it is"), rows),
        f"Over {results['sequences']} sequences, ± standard error of the difference over documents. Uniform: each head "
        "has an equal part in every token. By position: memberships are their mean at that position over other "
        "sequences. Constant moments: the second moments are their mean at other sequences' end.",
    ])  # fmt: skip


def swaps_chart(losses: Sequence[Mapping[str, Any]]) -> Chart:
    """The change of the loss by each part that is taken away, with its standard error."""
    _, *others = losses
    figure = Figure(figsize=(6, 0.9 + 0.5 * len(others)), layout="constrained")
    axes = figure.add_subplot()
    places = list(range(len(others), 0, -1))
    changes, errors = [loss["change"] for loss in others], [loss["standard_error"] or 0 for loss in others]
    axes.errorbar(changes, places, xerr=errors, color=DARK, marker="o", linestyle="none", capsize=3)
    axes.axvline(0, color="0.5", linewidth=1)
    axes.set_yticks(places, [loss["name"] for loss in others])
    axes.set_ylim(0.5, len(others) + 0.5)
    axes.set_xlabel("change of the loss (nats per token), above 0: worse")
    axes.grid(alpha=0.3, axis="x")
    keys = ("name", "nats_per_token", "change", "standard_error")
    header = ["part taken away", "loss (nats/token)", "change (nats/token)", "standard error (nats/token)"]
    return Chart(figure, header, [[loss[key] for key in keys] for loss in losses])
