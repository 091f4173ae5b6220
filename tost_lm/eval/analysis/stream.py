"""Residual stream before the TSSA layers: token norms, and statistics of frequent and rare tokens.

Shapes: N sequences, T tokens, L TSSA layers, G groups of tokens by their information.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from tost_lm.data.tokenizers.interface import token_text
from tost_lm.eval.analysis.layers import LayerTile, run_in_tiles, tssa_mixers
from tost_lm.eval.analysis.memberships import Analysis, concentration
from tost_lm.eval.analysis.tokens import visible
from tost_lm.inference.protocol_names import STREAM
from tost_lm.markdown import table
from tost_lm.model import TostLM
from tost_lm.report.page import (
    LIGHTEST,
    SHAPES,
    Chart,
    Page,
    line_data,
    log_value_axis,
    new_panels,
    number_ticks,
    shade,
)
from tost_lm.report.protocols import analysis_section

LARGE_NORM_MEDIANS = 3.0
GROUPS, LONGEST = 4, 5


class InformationGroup(NamedTuple):
    """Tokens of similar unigram information; means over its tokens by TSSA layer."""

    from_nats: float
    to_nats: float
    """Smallest and largest unigram information in nats."""
    tokens: int
    update: list[float]
    """‖update by the layer's branch‖ / ‖residual stream before it‖."""
    concentration: list[float]
    """Concentration of the memberships."""
    kept: list[float]
    """Cosine between the residual stream before the layer and before the first TSSA layer."""


class Norms(NamedTuple):
    """Euclidean norms of the tokens in the residual stream before one TSSA layer."""

    median: float
    long_share: float
    """Fraction of tokens with a norm above `LARGE_NORM_MEDIANS` medians."""
    longest: list[tuple[int, int, float]]
    """Tokens with the largest norms: sequence, position, norm / median."""


def stream_statistics(
    model: TostLM, sequences_NT: Tensor, information_NT: Tensor, groups: int, longest: int
) -> tuple[list[InformationGroup], list[Norms]]:
    """Up to `groups` groups of about the same size, the rarest tokens last, and the norms by TSSA layer.

    All occurrences of a token are in one group, so a very frequent token leaves fewer groups.
    """
    edges = np.quantile(information_NT.cpu().numpy(), np.arange(1, groups) / groups)
    bin_NT = torch.bucketize(information_NT, torch.from_numpy(np.unique(edges)).to(information_NT.device))
    group_NT = bin_NT.unique(return_inverse=True)[1]
    sizes_G = group_NT.flatten().bincount()
    layers = len(tssa_mixers(model))
    sums_FGL = torch.zeros(3, len(sizes_G), layers, dtype=torch.float64, device=sequences_NT.device)
    norms_LNT = torch.zeros(layers, *sequences_NT.shape, device=sequences_NT.device)
    first_stream: list[Tensor] = []

    def on_tile(n: int, tile: LayerTile) -> None:
        x_TC = tile.x_BTC[0].double()
        if tile.layer == 0:
            first_stream[:] = [x_TC]
        norm_T = x_TC.norm(dim=-1)
        norms_LNT[tile.layer, n, tile.positions] = norm_T.to(norms_LNT.dtype)
        values = (
            tile.branch[0].double().norm(dim=-1) / norm_T,
            concentration(tile.pi[0]),
            cosine_similarity(x_TC, first_stream[0], dim=-1),
        )
        for sums_GL, value_T in zip(sums_FGL, values, strict=True):
            sums_GL[:, tile.layer].index_add_(0, group_NT[n, tile.positions], value_T)

    for n, tokens_T in enumerate(sequences_NT):
        run_in_tiles(model, tokens_T[None], partial(on_tile, n))
    updates, concentrations, kept = (sums_FGL / sizes_G[:, None]).tolist()
    found = []
    for group, size in enumerate(sizes_G.tolist()):
        of_group = information_NT[group_NT == group]
        nats = float(of_group.min()), float(of_group.max())
        found.append(InformationGroup(*nats, size, updates[group], concentrations[group], kept[group]))
    return found, [_norms(norms_NT, longest) for norms_NT in norms_LNT]


def _norms(norms_NT: Tensor, longest: int) -> Norms:
    median = float(norms_NT.median())
    values, indices = norms_NT.flatten().topk(min(longest, norms_NT.numel()))
    tokens = norms_NT.shape[1]
    return Norms(
        median,
        float((norms_NT > LARGE_NORM_MEDIANS * median).double().mean()),
        [
            (index // tokens, index % tokens, value / median)
            for index, value in zip(indices.tolist(), values.tolist(), strict=True)
        ],
    )


def measure(of: Analysis) -> dict[str, Any]:
    """Statistics of the residual stream by unigram information, and the tokens with the largest norms."""
    information_NT = of.information_V.to(of.sequences.device)[of.sequences]
    groups, layers = stream_statistics(of.model, of.sequences, information_NT, GROUPS, LONGEST)

    def describe(n: int, position: int, medians: float) -> dict[str, Any]:
        text = token_text(of.tokenizer, int(of.sequences[n, position]))
        return {"text": text, "sequence": n, "position": position, "medians": medians}

    norms = [{**layer._asdict(), "longest": [describe(*token) for token in layer.longest]} for layer in layers]
    return {"groups": [group._asdict() for group in groups], "long_medians": LARGE_NORM_MEDIANS, "layers": norms}


PANELS = {
    "update": "relative update by the branch",
    "concentration": "concentration of memberships",
    "kept": "cosine with the first layer's input",
}


@analysis_section("Residual stream", STREAM)
def section(results: dict[str, Any], page: Page) -> list[str]:
    """Statistics by unigram information, and token norms."""
    rows = [
        (
            str(number),
            f"{layer['median']:.3g}",
            f"{layer['long_share']:.2%}",
            " · ".join(f"“{visible(t['text'])}” at {t['position']:,}: {t['medians']:.1f}" for t in layer["longest"]),
        )
        for number, layer in enumerate(results["layers"], 1)
    ]
    return [
        page.add_figure("stream", information_chart(results["groups"]), "Frequent and rare tokens by layer"),
        "Means over groups of tokens of about the same size, by unigram information: −ln of the token's relative "
        "frequency in the held-out text. The relative update is the norm of the branch's output divided by that of the "
        "residual stream before it.",
        table(
            (
                "TSSA layer",
                "median norm",
                f"norm above {results['long_medians']:g} medians",
                "largest norms (token, position, norm / median)",
            ),
            rows,
        ),
        "Euclidean norms of the tokens in the residual stream before each layer.",
    ]


def information_chart(groups: Sequence[Mapping[str, Any]]) -> Chart:
    """Statistics by layer, a line for each group of tokens."""
    figure, panels = new_panels(9, 3.8, len(PANELS))
    numbers = list(range(1, 1 + len(groups[0]["update"])))
    lines = {}
    for axes, (key, label) in zip(panels, PANELS.items(), strict=True):
        for i, group in enumerate(groups):
            name = f"{group['from_nats']:.1f} to {group['to_nats']:.1f} nats"
            colour = shade(LIGHTEST * i / max(len(groups) - 1, 1))
            axes.plot(numbers, group[key], color=colour, marker=SHAPES[i % len(SHAPES)], markersize=4, label=name)
            lines[f"{label}, group {i + 1}, {name} (1)"] = (numbers, group[key])
        number_ticks(axes.xaxis, len(numbers), 1)
        axes.set_xlabel("TSSA layer")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    log_value_axis(panels[0])
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return Chart(figure, **line_data("TSSA layer", lines))
