"""Preferences of heads for tokens. The surplus of a token in a head is a standardised membership (z-score):

    surplus = (Π − mean of Π at that position in the other sequences) / (standard deviation of Π in the position bin)

Π of late tokens varies far less, and the division gives early and late tokens the same weight.

Shapes: N sequences, T tokens, L TSSA layers, H heads, K groups of tokens (for example by token id), P position bins.
"""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tost_lm.analysis.layers import LayerTile, run_in_tiles
from tost_lm.analysis.memberships import MIN_DEVIATION, ByPosition, explained_fraction
from tost_lm.model import TostLM


class Surplus(NamedTuple):
    """Sums of the surplus over the tokens, float64."""

    sequences: int
    squares_L: Tensor
    """Sum of squares, over the heads as well."""
    by_group: dict[str, Tensor]
    """Sums by group [K, L, H], for each labelling."""
    sizes: dict[str, Tensor]
    """Number of tokens in each group [K], for each labelling; no group is empty."""


class Typical(NamedTuple):
    """Groups of tokens with the most extreme mean surplus in one head of one layer, as (group, mean surplus)."""

    most: list[tuple[int, float]]
    """The largest first."""
    least: list[tuple[int, float]]
    """The smallest first."""


def surpluses(model: TostLM, sequences_NT: Tensor, positions: ByPosition, labels: Mapping[str, Tensor]) -> Surplus:
    """Sums of the surplus of all tokens in the sequences.

    Args:
        positions: statistics of the same sequences.
        labels: group index of each token [N, T], int64, 0 to K − 1 without gaps, for each labelling.
    """
    layers, _, heads = positions.mean_LTH.shape
    zeros = partial(torch.zeros, dtype=torch.float64, device=sequences_NT.device)
    sizes = {name: labels_NT.flatten().bincount() for name, labels_NT in labels.items()}
    by_group = {name: zeros(len(size_K), layers, heads) for name, size_K in sizes.items()}
    found = Surplus(len(sequences_NT), zeros(layers), by_group, sizes)

    def on_tile(n: int, tile: LayerTile) -> None:
        surplus_TH = _surplus(tile, positions)
        found.squares_L[tile.layer] += surplus_TH.square().sum()
        for name, labels_NT in labels.items():
            found.by_group[name][:, tile.layer].index_add_(0, labels_NT[n, tile.positions], surplus_TH)

    for n, tokens_T in enumerate(sequences_NT):
        run_in_tiles(model, tokens_T[None], partial(on_tile, n))
    return found


def explained_by(found: Surplus, labelling: str) -> list[float | None]:
    """Fraction of the variance of Π at a position that the groups explain (`explained_fraction`), by TSSA layer.

    No group can explain the 1/N of the surplus variance that comes from its mean; the fraction refers to the rest.
    """
    sums_KLH, sizes_K = found.by_group[labelling], found.sizes[labelling]
    between_L = (sums_KLH.square() / sizes_K[:, None, None]).sum((0, 2))
    count, groups = int(sizes_K.sum()), len(sizes_K)
    fractions = [
        explained_fraction(total - between, total, count, groups)
        for total, between in zip(found.squares_L.tolist(), between_L.tolist(), strict=True)
    ]
    return [None if x is None else x * found.sequences / (found.sequences - 1) for x in fractions]


def typical(found: Surplus, labelling: str, *, groups: int, tokens: int, errors: float) -> list[list[Typical]]:
    """The groups with the largest and the smallest mean surplus in each head of each TSSA layer, [L][H].

    Args:
        groups: largest length of each list.
        tokens: smallest size of a group.
        errors: smallest distance of the mean surplus from 0, in standard errors of as many random tokens.
    """
    kept_k = (found.sizes[labelling] >= tokens).nonzero()[:, 0]
    sizes_k11 = found.sizes[labelling][kept_k, None, None]
    means_kLH = found.by_group[labelling][kept_k] / sizes_k11
    variance = found.sequences / max(found.sequences - 1, 1)
    is_certain_kLH = means_kLH.abs() >= errors * (variance / sizes_k11).sqrt()
    order_kLH = means_kLH.argsort(dim=0, descending=True, stable=True)

    def listed(layer: int, head: int, sign: int) -> list[tuple[int, float]]:
        order_k = order_kLH[:, layer, head] if sign > 0 else order_kLH[:, layer, head].flip(0)
        means_k = means_kLH[order_k, layer, head]
        kept = order_k[is_certain_kLH[order_k, layer, head] & (sign * means_k > 0)][:groups]
        return [(int(kept_k[i]), float(means_kLH[i, layer, head])) for i in kept]

    _, layers, heads = means_kLH.shape
    return [
        [Typical(listed(layer, head, 1), listed(layer, head, -1)) for head in range(heads)] for layer in range(layers)
    ]


def surplus_of_text(model: TostLM, tokens_T: Tensor, positions: ByPosition) -> Tensor:
    """Surplus of the first tokens of one of the sequences [L, T, H]."""
    surplus_LTH = torch.zeros_like(positions.mean_LTH[:, : len(tokens_T)])

    def on_tile(tile: LayerTile) -> None:
        surplus_LTH[tile.layer, tile.positions] = _surplus(tile, positions)

    run_in_tiles(model, tokens_T[None], on_tile)
    return surplus_LTH


def _surplus(tile: LayerTile, positions: ByPosition) -> Tensor:
    """Surplus of the tile's only row [T, H]; 0 where Π does not vary."""
    deviation_PH = positions.deviation_LPH[tile.layer]
    per_deviation_PH = (1 / deviation_PH).where(deviation_PH > MIN_DEVIATION, 0)
    others = positions.sequences / max(positions.sequences - 1, 1)  # the mean includes the token itself
    difference_TH = tile.pi[0] - positions.mean_LTH[tile.layer, tile.positions]
    return others * difference_TH * per_deviation_PH[positions.bin_T[tile.positions]]
