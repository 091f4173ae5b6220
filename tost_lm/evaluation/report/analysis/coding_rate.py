"""Report section: coding rates of the TSSA layers."""

from collections.abc import Mapping, Sequence
from typing import Any

from tost_lm.evaluation.report.analysis.layers import layers_chart, number_ticks
from tost_lm.evaluation.report.analysis.section import analysis_section
from tost_lm.evaluation.report.charts import Chart, line_data, new_figure
from tost_lm.evaluation.report.curves import CONTRAST, DARK
from tost_lm.evaluation.report.page import Page
from tost_lm.evaluation.subject import CODING_RATE
from tost_lm.markdown import escape, table, with_error

CHANGE = "change of R_var (nats)"
COLUMNS = {
    "coding": ("R_c", ".3f"),
    "variational": ("R_var", ".3f"),
    "gap": ("R_var − R_c", ".3f"),
    "coding_change": ("change of R_c", "+.4f"),
    "variational_change": ("change of R_var", "+.4f"),
    "orthonormal_coding": ("R_c, orthonormal bases", ".3f"),
    "orthonormal_variational": ("R_var, orthonormal bases", ".3f"),
    "full": ("unprojected tokens", ".3f"),
}
RATES = {"coding": "R_c, coding rate", "variational": "R_var, variational form"}


@analysis_section("Coding rates", CODING_RATE)
def coding_rates(results: dict[str, Any], page: Page) -> list[str]:
    """Rates before and after each layer's branch."""
    layers: list[dict[str, Any]] = results["layers"]
    rows = [
        (str(number), *[with_error(**layer[name], form=form) for name, (_, form) in COLUMNS.items()])
        for number, layer in enumerate(layers, start=1)
    ]
    return [
        page.add_figure("coding_rate", change_chart(layers), "Change of the coding rates by each TSSA layer's branch"),
        table(("TSSA layer", *[label for label, _ in COLUMNS.values()]), rows),
        f"Rates in nats, mean over {results['sequences']} sequences of {results['position_ends'][-1]:,} tokens ± "
        "standard error over documents. R_c is the coding rate of the tokens in the heads' subspaces. R_var ≥ R_c is "
        "its variational form, which the operator descends. A change is the effect of the layer's branch, negative "
        "where the layer compresses.",
        page.add_figure("coding_rate_prefixes", prefix_chart(results), "Coding rates by prefix"),
        "Rates of the first tokens of a sequence, the prefixes that the causal operator uses.",
        *_over_training(results["steps"], results["left_out_checkpoints"], page),
    ]


def change_chart(layers: Sequence[Mapping[str, Any]]) -> Chart:
    """Change by the layer's branch with its standard error, for each layer and rate."""
    figure, axes = new_figure(7, 3.4)
    numbers = list(range(1, len(layers) + 1))
    lines = {}
    for (name, label), color, marker, offset in zip(RATES.items(), (DARK, CONTRAST), "os", (-0.08, 0.08), strict=True):
        changes = [layer[f"{name}_change"] for layer in layers]
        means, errors = [change["mean"] for change in changes], [change["standard_error"] or 0.0 for change in changes]
        axes.errorbar(
            [number + offset for number in numbers], means, yerr=errors, color=color, marker=marker, linestyle="none",
            capsize=3, label=label,
        )  # fmt: skip
        lines |= {f"change of {label} (nats)": (numbers, means), f"standard error of {label} (nats)": (numbers, errors)}
    axes.axhline(0, color="0.5", linewidth=1)
    number_ticks(axes.xaxis, len(numbers), 1)
    axes.set_xlabel("TSSA layer")
    axes.set_ylabel("change by its branch (nats)\nbelow 0: compression")
    axes.legend()
    return Chart(figure, **line_data("TSSA layer", lines))


def prefix_chart(results: Mapping[str, Any]) -> Chart:
    """R_var by prefix, and its change by the layer's branch."""
    panels = {
        label: [layer[f"{name}_by_prefix"]["mean"] for layer in results["layers"]]
        for name, label in (("variational", "R_var (nats)"), ("variational_change", CHANGE))
    }
    return layers_chart("tokens of the prefix", results["position_ends"], panels)


def steps_chart(steps: Sequence[Mapping[str, Any]]) -> Chart:
    """Change of R_var by the layers' branches, and R_var − R_c, over training."""
    panels = {
        label: list(zip(*[[layer[name]["mean"] for layer in row["layers"]] for row in steps], strict=True))
        for name, label in (("variational_change", CHANGE), ("gap", "R_var − R_c (nats)"))
    }
    return layers_chart("training step", [row["step"] for row in steps], panels, steps=True)


def _over_training(steps: Sequence[Mapping[str, Any]], left_out: Sequence[str], page: Page) -> list[str]:
    """Rates of the retained checkpoints, if there are several."""
    if len(steps) < 2:
        return []
    return [
        page.add_figure("coding_rate_steps", steps_chart(steps), "Coding rates of the retained checkpoints"),
        f"Rates of the {len(steps)} retained checkpoints (`checkpoint.keep_latest_k`, `checkpoint.retain_interval`).",
        *[f"Skipped checkpoint: {escape(problem)}." for problem in left_out],
    ]
