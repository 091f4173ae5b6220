"""Report sections: memberships of a run by TSSA layer, and of several runs by group."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tost_lm.evaluation.report.analysis.layers import layers_chart
from tost_lm.evaluation.report.analysis.section import analysis_section
from tost_lm.evaluation.report.charts import Chart
from tost_lm.evaluation.report.groups import Curve, Group, curve
from tost_lm.evaluation.report.page import Page
from tost_lm.evaluation.subject import MEMBERSHIPS
from tost_lm.markdown import escape, table, with_error

CONCENTRATION = (
    "Concentration of the memberships by position: 1 − entropy over the heads / ln(heads), 0 for uniform memberships "
    "and 1 where one head has the whole token."
)


@analysis_section("Memberships", MEMBERSHIPS)
def memberships_of_run(results: dict[str, Any], page: Page) -> list[str]:
    """Memberships of each TSSA layer by position and after more context."""
    by_position = zip(*results["concentration_by_position"], strict=True)
    layers = [f"TSSA layer {number}" for number in range(1, 1 + len(results["concentration_by_position"]))]
    rows = [
        (f"{row['context_tokens']:,}", f"{row['nats_per_token']:.4f}", *_three_digits(row["moved"]))
        for row in results["after_context"]
    ]
    return [
        page.add_figure("memberships", position_chart(results), "Concentration, spread, and explained variance"),
        f"{CONCENTRATION} The spread is the standard deviation of a token's scores over the heads; memberships are the "
        "softmax of the scores. On the right, the fraction of the variance within a position bin that the position "
        f"explains. Over all positions it explains {_percentages(results)} (by layer).",
        table(
            ("positions up to", *layers),
            [
                (f"{end:,}", *_three_digits(values))
                for end, values in zip(results["position_ends"], by_position, strict=True)
            ],
        ),
        f"The first {results['probe_tokens']} tokens of {results['sequences']} sequences after context tokens of other "
        "text: loss in nats per token, and change of the memberships (total variation distance) by layer.",
        table(("context tokens", "loss", *layers), rows),
    ]


def position_chart(results: Mapping[str, Any]) -> Chart:
    """Concentration, spread, and variance explained by position."""
    panels = {
        "concentration": results["concentration_by_position"],
        "score spread (nats)": results["score_spread_by_position"],
        "explained variance": results["explained_within_stretches"],
    }
    return layers_chart("position (tokens, end of the bin)", results["position_ends"], panels)


def memberships_of_groups(groups: Sequence[Group]) -> str:
    """Memberships by position and after more context; means over layers, then over runs."""
    found = {group.label: results for group in groups if (results := group.results(MEMBERSHIPS))}
    if not found:
        return ""
    by_position = {
        label: curve(results[0]["position_ends"], _over_layers([r["concentration_by_position"] for r in results], 1))
        for label, results in found.items()
    }
    return "\n\n".join([
        f"## Memberships ({escape(MEMBERSHIPS)})",
        CONCENTRATION,
        curve_table("group", "positions up to", by_position, ".3f"),
        "Change of the memberships (total variation distance) of the same tokens after context tokens of other text:",
        curve_table("group", "change after", _after(found, "moved"), ".3f"),
        "Concentration of the same tokens:",
        curve_table("group", "concentration after", _after(found, "concentration"), ".3f"),
        "Loss of the same tokens in nats per token:",
        curve_table("group", "loss after", _after(found, "nats_per_token"), ".3f"),
        "Means over the TSSA layers ± standard error over the runs of a group.",
    ])  # fmt: skip


def curve_table(name: str, x: str, curves: Mapping[str, Curve], form: str) -> str:
    """A row for each curve and a column for each of their xs."""
    xs = sorted({at for line in curves.values() for at in line.xs})
    rows = [(label, *[_at(line, at, form) for at in xs]) for label, line in curves.items()]
    return table((name, *[f"{x} {at:,}" for at in xs]), rows)


def _at(line: Curve, x: int, form: str) -> str:
    if x not in line.xs:
        return "–"
    i = line.xs.index(x)
    return with_error(line.mean[i], None if line.error is None else line.error[i], form)


def _after(found: Mapping[str, Sequence[dict[str, Any]]], key: str) -> dict[str, Curve]:
    curves = {}
    for label, results in found.items():
        amounts = [row["context_tokens"] for row in results[0]["after_context"]]
        values = [[row[key] for row in result["after_context"]] for result in results]
        curves[label] = curve(amounts, _over_layers(values, 2) if np.ndim(values) == 3 else np.array(values))
    return curves


def _over_layers(values: Sequence[Any], dim: int) -> np.ndarray:
    return np.array(values, dtype=float).mean(axis=dim)


def _percentages(results: Mapping[str, Any]) -> str:
    return ", ".join("–" if value is None else f"{value:.1%}" for value in results["explained_by_position"])


def _three_digits(values: Sequence[float]) -> list[str]:
    return [f"{value:.3f}" for value in values]
