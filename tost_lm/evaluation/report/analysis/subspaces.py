"""The section of a run's report about the subspaces of its TSSA layers' heads."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from tost_lm.evaluation.report.analysis.layers import number_ticks, some_layers
from tost_lm.evaluation.report.charts import Chart
from tost_lm.evaluation.report.markdown import escape, table
from tost_lm.evaluation.report.page import Page
from tost_lm.evaluation.report.protocols import of_checkpoint
from tost_lm.evaluation.report.record import Evaluated
from tost_lm.evaluation.subject import SUBSPACES


def subspaces(run: Evaluated, page: Page) -> str:
    """How orthogonal they are, how much they overlap, what lies in none; empty without results."""
    results = run.results(SUBSPACES)
    if results is None:
        return ""
    rows = [
        (
            str(number),
            f"{layer['mean']['effective_rank']:.1f} of {layer['channels']}",
            f"{layer['mean']['orthogonality']:.3f}",
            f"{layer['mean']['overlap']:.3f} ({layer['chance_overlap']:.3f})",
            f"{layer['spanned']:,}",
            f"{layer['outside']:.2%}",
        )
        for number, layer in enumerate(results["layers"], 1)
    ]
    return "\n\n".join([
        f"## Subspaces ({escape(SUBSPACES)})",
        of_checkpoint(run, results, f"eval.analyze {run.with_text}"),
        page.show("subspaces", overlap_chart(results["layers"]), "Overlap of the heads' subspaces"),
        table(
            ("TSSA layer", "effective rank", "from orthogonal", "overlap (by chance)", "dimensions spanned", "outside"),
            rows,
        ),
        "Means over heads, of overlap over pairs of them: 0 for orthogonal subspaces, 1 for the same. From "
        "orthogonal is 0 where a head's rows are orthogonal and of one length. Outside is the share of the tokens' "
        "squared length that no head projects.",
    ])  # fmt: skip


def overlap_chart(layers: Sequence[Mapping[str, Any]]) -> Chart:
    """The overlap of each pair of different heads, of a few layers."""
    chosen = some_layers(len(layers))
    overlap_LHH = np.array([layer["overlap"] for layer in layers])[chosen]
    overlap_LHH[:, np.eye(overlap_LHH.shape[-1], dtype=bool)] = np.nan
    figure = Figure(figsize=(1.4 + 2.4 * len(chosen), 2.9), layout="constrained")
    panels = figure.subplots(1, len(chosen), squeeze=False)[0]
    image: Any = None
    for axes, number, overlap_HH in zip(panels, chosen, overlap_LHH, strict=True):
        image = axes.imshow(overlap_HH, cmap="cividis", vmin=0, vmax=np.nanmax(overlap_LHH))
        number_ticks(axes.xaxis, len(overlap_HH), 0)
        number_ticks(axes.yaxis, len(overlap_HH), 0)
        axes.set_xlabel("head")
        axes.set_title(f"TSSA layer {number + 1}", fontsize=10)
    panels[0].set_ylabel("head")
    chance = layers[0]["chance_overlap"]
    figure.colorbar(image, ax=panels, label=f"overlap (1: the same subspace,\nby chance {chance:.3f})")
    rows = [
        [number, head + 1, other + 1, overlap]
        for number, layer in enumerate(layers, start=1)
        for head, overlaps in enumerate(layer["overlap"])
        for other, overlap in enumerate(overlaps)
    ]
    return Chart(figure, ["TSSA layer", "head", "other head", "overlap (1)"], rows)
