"""Report section: loss with ablations of the operator."""

from collections.abc import Mapping, Sequence
from typing import Any

from tost_lm.evaluation.report.analysis.section import analysis_section
from tost_lm.evaluation.report.charts import Chart, new_figure
from tost_lm.evaluation.report.curves import DARK
from tost_lm.evaluation.report.page import Page
from tost_lm.evaluation.subject import ABLATIONS
from tost_lm.markdown import table, with_error


@analysis_section("Ablations of the operator", ABLATIONS)
def ablations(results: dict[str, Any], page: Page) -> list[str]:
    """The loss with each ablation."""
    rows = [
        (loss["name"], f"{loss['nats_per_token']:.4f}", with_error(loss["change"], loss["standard_error"], "+.4f"))
        for loss in results["losses"]
    ]
    return [
        page.add_figure("ablations", ablations_chart(results["losses"]), "Change of the loss by ablation"),
        table(("TSSA layers", "nats per token", "change"), rows),
        f"Mean over {results['sequences']} sequences; ± is the standard error of the change over documents. Uniform: "
        "each head has the membership 1/H. By position: memberships are their mean at that position over other "
        "sequences. Constant moments: second moments are their mean at the end of other sequences.",
    ]


def ablations_chart(losses: Sequence[Mapping[str, Any]]) -> Chart:
    """Change of the loss by ablation, with its standard error."""
    _, *others = losses
    figure, axes = new_figure(6, 0.9 + 0.5 * len(others))
    rows = list(range(len(others), 0, -1))
    changes, errors = [loss["change"] for loss in others], [loss["standard_error"] or 0 for loss in others]
    axes.errorbar(changes, rows, xerr=errors, color=DARK, marker="o", linestyle="none", capsize=3)
    axes.axvline(0, color="0.5", linewidth=1)
    axes.set_yticks(rows, [loss["name"] for loss in others])
    axes.set_ylim(0.5, len(others) + 0.5)
    axes.set_xlabel("change of the loss (nats per token), above 0: worse")
    axes.grid(alpha=0.3, axis="x")
    keys = ("name", "nats_per_token", "change", "standard_error")
    header = ["ablation", "loss (nats/token)", "change (nats/token)", "standard error (nats/token)"]
    return Chart(figure, header, [[loss[key] for key in keys] for loss in losses])
