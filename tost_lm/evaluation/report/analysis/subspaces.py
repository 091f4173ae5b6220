"""Report section: subspaces of the heads."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from tost_lm.evaluation.report.analysis.layers import number_ticks, select_layers
from tost_lm.evaluation.report.analysis.section import analysis_section
from tost_lm.evaluation.report.charts import Chart
from tost_lm.evaluation.report.page import Page
from tost_lm.evaluation.subject import SUBSPACES
from tost_lm.markdown import table


@analysis_section("Subspaces", SUBSPACES)
def subspaces(results: dict[str, Any], page: Page) -> list[str]:
    """Rank, orthogonality and overlap of the heads' subspaces."""
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
    return [
        page.add_figure("subspaces", overlap_chart(results["layers"]), "Overlap of the heads' subspaces"),
        table(
            ("TSSA layer", "effective rank", "non-orthogonality", "overlap (chance)", "rank of all heads", "outside"),
            rows,
        ),
        "Means over heads. Overlap is a mean over pairs of heads: 0 for orthogonal subspaces, 1 for the same subspace. "
        "Non-orthogonality is 0 where a head's rows are orthogonal and of equal norm. Outside is the fraction of the "
        "tokens' energy in directions that no head projects.",
    ]


def overlap_chart(layers: Sequence[Mapping[str, Any]]) -> Chart:
    """Overlap of each pair of heads, in some layers."""
    chosen = select_layers(len(layers))
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
    figure.colorbar(image, ax=panels, label=f"overlap (1: same subspace,\nchance {chance:.3f})")
    rows = [
        [number, head + 1, other + 1, overlap]
        for number, layer in enumerate(layers, start=1)
        for head, overlaps in enumerate(layer["overlap"])
        for other, overlap in enumerate(overlaps)
    ]
    return Chart(figure, ["TSSA layer", "head", "other head", "overlap (1)"], rows)
