"""Change of a TSSA layer's output when one earlier token is replaced.

Shapes: N sequences, T tokens, K replaced tokens, L TSSA layers, P distance bins.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tost_lm.errors import DataError
from tost_lm.eval.analysis.layers import LayerTile, run_in_tiles, standard_error, tssa_mixers
from tost_lm.eval.analysis.memberships import Analysis
from tost_lm.inference.protocol_names import INFLUENCE
from tost_lm.markdown import table, with_error
from tost_lm.model import TostLM
from tost_lm.report.page import (
    Chart,
    Page,
    add_layer_legend,
    draw_layers,
    layer_columns,
    line_data,
    log_value_axis,
    new_figure,
    position_axis,
)
from tost_lm.report.protocols import analysis_section

SWAPS = 4


class Influence(NamedTuple):
    """‖y' − y‖ / ‖y‖ of a TSSA layer's output y, with y' the output after one token of the text is replaced.

    The lower layers see the replaced token too.
    """

    distance_ends: list[int]
    """Last distance in tokens of each bin: 1, 2, 4, …"""
    mean: list[list[float]]
    """Mean over the sequences [L][P]."""
    standard_error: list[list[float]] | None
    """Standard error over the documents [L][P]; None if there is only one document."""


def influence(model: TostLM, sequences_NT: Tensor, documents_N: Tensor, swaps: int) -> Influence:
    """Influence by distance. In each sequence, `swaps` tokens are replaced one at a time by other tokens of the text.

    The tokens are in the first half of a sequence, and distances reach half a sequence: each distance bin averages over
    the same tokens.
    """
    ends = distance_ends(sequences_NT.shape[1] // 2)
    ends_P = torch.tensor(ends, device=sequences_NT.device)
    change_NLP = torch.stack([
        _change_in_sequence(model, sequences_NT, n, swaps, ends_P) for n in range(len(sequences_NT))
    ])  # fmt: skip
    error = standard_error(change_NLP, documents_N)
    return Influence(ends, change_NLP.mean(0).tolist(), None if error is None else error.tolist())


def distance_ends(reach: int) -> list[int]:
    """1, 2, 4, …, `reach`."""
    doubled = [2**i for i in range(reach.bit_length()) if 2**i < reach]
    return [*doubled, reach]


def _change_in_sequence(model: TostLM, sequences_NT: Tensor, n: int, swaps: int, ends_P: Tensor) -> Tensor:
    """Mean over the replaced tokens [L, P]."""
    tokens_T, reach = sequences_NT[n], int(ends_P[-1])
    positions_K, others_K = draw_swaps(sequences_NT, n, swaps)
    rows_BT = tokens_T.repeat(1 + swaps, 1)
    rows_BT[torch.arange(1, 1 + swaps, device=tokens_T.device), positions_K] = others_K
    sums_LP = torch.zeros(len(tssa_mixers(model)), len(ends_P), dtype=torch.float64, device=tokens_T.device)

    def on_tile(tile: LayerTile) -> None:
        y_BTC = tile.y_BTC.double()
        change_KT = (y_BTC[1:] - y_BTC[:1]).norm(dim=-1) / y_BTC[:1].norm(dim=-1)
        position_T = torch.arange(tile.positions.start, tile.positions.stop, device=tokens_T.device)
        distance_KT = position_T - positions_K[:, None]
        counted_KT = (distance_KT >= 1) & (distance_KT <= reach)
        sums_LP[tile.layer].index_add_(0, torch.bucketize(distance_KT[counted_KT], ends_P), change_KT[counted_KT])

    run_in_tiles(model, rows_BT, on_tile)
    return sums_LP / (swaps * ends_P.diff(prepend=ends_P.new_zeros(1)))


def draw_swaps(sequences_NT: Tensor, n: int, swaps: int) -> tuple[Tensor, Tensor]:
    """Positions in the first half of sequence n and other tokens to put there, each [K].

    Raises:
        DataError: all tokens of the sequences are equal.
    """
    draw = torch.Generator().manual_seed(n)
    randint = partial(torch.randint, size=(swaps,), generator=draw)
    positions_K = randint(sequences_NT.shape[1] // 2).to(sequences_NT.device)
    tokens_M = sequences_NT.flatten()
    if bool((tokens_M == tokens_M[0]).all()):
        raise DataError(f"all tokens of the text are equal: id {tokens_M[0]}; give more text (heldout.shards=FOLDER)")
    others_K = tokens_M[randint(len(tokens_M)).to(tokens_M.device)]
    while bool((same_K := others_K == sequences_NT[n, positions_K]).any()):
        others_K = others_K.where(~same_K, tokens_M[randint(len(tokens_M)).to(tokens_M.device)])
    return positions_K, others_K


def measure(of: Analysis) -> dict[str, Any]:
    """Influence of replaced tokens by distance."""
    found = influence(of.model, of.sequences, of.text.document_of, SWAPS)
    return {"swaps": SWAPS * len(of.sequences), **found._asdict()}


@analysis_section("Influence of one token", INFLUENCE)
def section(results: dict[str, Any], page: Page) -> list[str]:
    """Influence by distance and layer."""
    errors = results["standard_error"] or [[None] * len(line) for line in results["mean"]]
    layers = [
        [with_error(value, error, "#.2g") for value, error in zip(*lines, strict=True)]
        for lines in zip(results["mean"], errors, strict=True)
    ]
    header = ("tokens later, up to", *[f"TSSA layer {number}" for number in range(1, 1 + len(layers))])
    return [
        page.add_figure("influence", influence_chart(results), "Change of a layer's output by distance"),
        f"Relative change ‖y′ − y‖ / ‖y‖ of a layer's output after one earlier token is replaced; mean over "
        f"{results['swaps']} replaced tokens in {results['sequences']} sequences ± standard error over documents.",
        table(header, [(f"{end:,}", *cells) for end, *cells in zip(results["distance_ends"], *layers, strict=True)]),
    ]


def influence_chart(results: Mapping[str, Any]) -> Chart:
    """Influence by distance, a line for each layer, both axes logarithmic."""
    figure, axes = new_figure(7, 3.6)
    ends, means = results["distance_ends"], results["mean"]
    draw_layers(axes, ends, means)
    position_axis(axes, "distance from the replaced token (tokens, end of the bin)")
    if all(value > 0 for line in means for value in line):
        log_value_axis(axes)
    axes.set_ylabel("relative change of the output")
    add_layer_legend(figure, len(means))
    columns = layer_columns(means, "relative change (1)")
    if results["standard_error"]:
        columns |= layer_columns(results["standard_error"], "standard error (1)")
    return Chart(figure, **line_data("tokens later, up to", {name: (ends, line) for name, line in columns.items()}))
