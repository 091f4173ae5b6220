"""The sections about the memberships of TSSA layers: of a run by layer, of several runs by group."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tost_lm.evaluation.report.analysis.layers import layers_chart
from tost_lm.evaluation.report.charts import Chart
from tost_lm.evaluation.report.groups import Curve, Group, curve
from tost_lm.evaluation.report.markdown import escape, table
from tost_lm.evaluation.report.page import Page
from tost_lm.evaluation.report.protocols import of_checkpoint
from tost_lm.evaluation.report.record import Evaluated
from tost_lm.evaluation.subject import MEMBERSHIPS

CONCENTRATION = (
    "Concentration by position: 1 − entropy over the heads / ln(heads), 0 where all heads take an equal part in a "
    "token, 1 where one takes it whole."
)


def memberships_of_run(run: Evaluated, page: Page) -> str:
    """How concentrated they are by position, and what text before does to them, of each TSSA layer."""
    results = run.results(MEMBERSHIPS)
    if results is None:
        return ""
    by_position = zip(*results["concentration_by_position"], strict=True)
    layers = [f"TSSA layer {number}" for number in range(1, 1 + len(results["concentration_by_position"]))]
    rows = [
        (f"{row['context_tokens']:,}", f"{row['nats_per_token']:.4f}", *_three_digits(row["moved"]))
        for row in results["after_context"]
    ]
    return "\n\n".join([
        f"## Memberships ({escape(MEMBERSHIPS)})",
        of_checkpoint(run, results, f"eval.analyze {run.with_text}"),
        page.show("memberships", position_chart(results), "Concentration, spread and what position explains"),
        f"{CONCENTRATION} The spread is the standard deviation over the heads of a token's scores, of which the "
        "memberships are the softmax. On the right, the share of the memberships' variance within a stretch of "
        f"positions that the position alone explains; of all their variance it is {_shares(results)}, layer by layer.",
        table(
            ("positions up to", *layers),
            [
                (f"{end:,}", *_three_digits(values))
                for end, values in zip(results["position_ends"], by_position, strict=True)
            ],
        ),
        f"The first {results['probe_tokens']} tokens of {results['sequences']} sequences after so many tokens of other "
        "text: their loss in nats per token, and how far their memberships moved (total variation).",
        table(("after", "loss", *layers), rows),
    ])  # fmt: skip


def position_chart(results: Mapping[str, Any]) -> Chart:
    """Concentration, spread, and what the position explains, by position."""
    panels = {
        "concentration (0: even, 1: one head)": results["concentration_by_position"],
        "spread of the scores over heads (nats)": results["score_spread_by_position"],
        "explained by the position alone (1)": results["explained_within_stretches"],
    }
    return layers_chart("position (tokens, up to the mark)", results["position_ends"], panels, doubling=True)


def memberships_of_groups(groups: Sequence[Group]) -> str:
    """How concentrated they are by position, and what text before does to them: means over layers, then over runs."""
    found = {group.label: results for group in groups if (results := _results(group))}
    if not found:
        return ""
    by_position = {
        label: curve(results[0]["position_ends"], _over_layers([r["concentration_by_position"] for r in results], 1))
        for label, results in found.items()
    }
    return "\n\n".join([
        f"## Memberships ({escape(MEMBERSHIPS)})",
        CONCENTRATION,
        places_table("group", "positions up to", by_position, ".3f"),
        "The same tokens after so many tokens of other text: how far their memberships moved (total variation),",
        places_table("group", "moved after", _after(found, "moved"), ".3f"),
        "their concentration,",
        places_table("group", "concentration after", _after(found, "concentration"), ".3f"),
        "and their loss in nats per token.",
        places_table("group", "loss after", _after(found, "nats_per_token"), ".3f"),
        "Means over the TSSA layers, and ± standard error over the runs of a group.",
    ])  # fmt: skip


def places_table(name: str, places: str, curves: Mapping[str, Curve], form: str) -> str:
    """A row for each curve, a column for each place that any of them has."""
    xs = sorted({x for line in curves.values() for x in line.xs})
    rows = [(label, *[_at(line, x, form) for x in xs]) for label, line in curves.items()]
    return table((name, *[f"{places} {x:,}" for x in xs]), rows)


def _at(line: Curve, x: int, form: str) -> str:
    if x not in line.xs:
        return "–"
    i = line.xs.index(x)
    return f"{line.mean[i]:{form}}" + ("" if line.error is None else f" ± {line.error[i]:{form}}")


def _after(found: Mapping[str, Sequence[dict[str, Any]]], key: str) -> dict[str, Curve]:
    curves = {}
    for label, results in found.items():
        amounts = [row["context_tokens"] for row in results[0]["after_context"]]
        values = [[row[key] for row in result["after_context"]] for result in results]
        curves[label] = curve(amounts, _over_layers(values, 2) if np.ndim(values) == 3 else np.array(values))
    return curves


def _over_layers(values: Sequence[Any], dim: int) -> np.ndarray:
    return np.array(values, dtype=float).mean(axis=dim)


def _shares(results: Mapping[str, Any]) -> str:
    return ", ".join("–" if share is None else f"{share:.1%}" for share in results["explained_by_position"])


def _three_digits(values: Sequence[float]) -> list[str]:
    return [f"{value:.3f}" for value in values]


def _results(group: Group) -> list[dict[str, Any]]:
    """Of the runs that have any; none where they are of different steps or settings, of which there is no mean."""
    found = [results for run in group.runs if (results := run.results(MEMBERSHIPS))]
    made_alike = {str([results["identity"][key] for key in ("step", "settings")]) for results in found}
    return found if len(made_alike) == 1 else []
