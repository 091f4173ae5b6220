"""Which tokens the heads take: Π of a token beside the mean of Π at its position, its surplus.

Shapes: N sequences, T tokens, L layers of TSSA, H heads, K groups of tokens (such as words).
"""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tost_lm.analysis.layers import LayerPiece, read
from tost_lm.analysis.memberships import explained_share
from tost_lm.model import TostLM


class Surplus(NamedTuple):
    """Summed over the tokens, float64."""

    squares_L: Tensor
    """Over the heads as well."""
    by_group: dict[str, Tensor]
    """Of each labelling [K, L, H]."""
    sizes: dict[str, Tensor]
    """Of the groups of each labelling [K], in tokens; none is empty."""


class Typical(NamedTuple):
    """Of one head of one layer: groups of tokens by their mean surplus."""

    most: list[tuple[int, float]]
    """The largest, with their numbers."""
    least: list[tuple[int, float]]
    """The smallest."""


def surpluses(model: TostLM, sequences_NT: Tensor, mean_LTH: Tensor, labels: Mapping[str, Tensor]) -> Surplus:
    """Those of all tokens of the sequences.

    Args:
        mean_LTH: Π, the mean at each position over these sequences, as `by_position` gives it.
        labels: the number of each token's group [N, T], int64, 0 to K − 1 without a gap; of each labelling.
    """
    layers, _, heads = mean_LTH.shape
    zeros = partial(torch.zeros, dtype=torch.float64, device=mean_LTH.device)
    sizes = {name: labels_NT.flatten().bincount() for name, labels_NT in labels.items()}
    found = Surplus(zeros(layers), {name: zeros(len(size_K), layers, heads) for name, size_K in sizes.items()}, sizes)

    def see(n: int, piece: LayerPiece) -> None:
        surplus_TH = piece.pi[0] - mean_LTH[piece.layer, piece.here]
        found.squares_L[piece.layer] += surplus_TH.square().sum()
        for name, labels_NT in labels.items():
            found.by_group[name][:, piece.layer].index_add_(0, labels_NT[n, piece.here], surplus_TH)

    for n, tokens_T in enumerate(sequences_NT):
        read(model, tokens_T[None], partial(see, n))
    return found


def explained_by(found: Surplus, labelling: str) -> list[float | None]:
    """Of each TSSA layer, which share of the variance of Π that position leaves the groups explain, as
    `explained_share`: about 0 for groups drawn by lot, 1 where all tokens of one group have the same surplus."""
    sums_KLH, sizes_K = found.by_group[labelling], found.sizes[labelling]
    between_L = (sums_KLH.square() / sizes_K[:, None, None]).sum((0, 2))
    count, groups = int(sizes_K.sum()), len(sizes_K)
    return [
        explained_share(total - between, total, count, groups)
        for total, between in zip(found.squares_L.tolist(), between_L.tolist(), strict=True)
    ]


def typical(found: Surplus, labelling: str, *, groups: int, tokens: int) -> list[list[Typical]]:
    """Of each head of each TSSA layer, [L][H]: so many `groups` of the largest mean surplus, and of the smallest, among
    those of that many `tokens` at least."""
    sizes_K = found.sizes[labelling]
    kept_k = (sizes_K >= tokens).nonzero()[:, 0]
    means_kLH = found.by_group[labelling][kept_k] / sizes_K[kept_k, None, None]
    order_kLH = means_kLH.argsort(dim=0, descending=True, stable=True)

    def listed(layer: int, head: int, order_k: Tensor) -> list[tuple[int, float]]:
        return [(int(kept_k[i]), float(means_kLH[i, layer, head])) for i in order_k]

    return [
        [
            Typical(
                listed(layer, head, order_kLH[:groups, layer, head]),
                listed(layer, head, order_kLH[-groups:, layer, head].flip(0)),
            )
            for head in range(order_kLH.shape[2])
        ]
        for layer in range(order_kLH.shape[1])
    ]


def surplus_of_text(model: TostLM, tokens_T: Tensor, mean_LTH: Tensor) -> Tensor:
    """Π beside its mean at the position, of each token of the beginning of a sequence, [L, T, H]."""
    surplus_LTH = torch.zeros_like(mean_LTH[:, : len(tokens_T)])

    def see(piece: LayerPiece) -> None:
        surplus_LTH[piece.layer, piece.here] = piece.pi[0] - mean_LTH[piece.layer, piece.here]

    read(model, tokens_T[None], see)
    return surplus_LTH
