"""Which tokens the heads take: by how many standard deviations Π of a token lies above its mean at that position and
head, the token's surplus. So all positions count alike, of which early ones vary far more; the mean of squares is 1.

Shapes: N sequences, T tokens, L layers of TSSA, H heads, K groups of tokens (such as words).
"""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tost_lm.analysis.layers import LayerPiece, read
from tost_lm.analysis.memberships import LEAST_DEVIATION, ByPosition, explained_share
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
    """The groups of the largest, by number; first those that are the most standard errors above 0."""
    least: list[tuple[int, float]]
    """Those of the smallest."""


def surpluses(model: TostLM, sequences_NT: Tensor, positions: ByPosition, labels: Mapping[str, Tensor]) -> Surplus:
    """Those of all tokens of the sequences.

    Args:
        positions: of these sequences.
        labels: the number of each token's group [N, T], int64, 0 to K − 1 without a gap; of each labelling.
    """
    layers, _, heads = positions.mean_LTH.shape
    zeros = partial(torch.zeros, dtype=torch.float64, device=sequences_NT.device)
    sizes = {name: labels_NT.flatten().bincount() for name, labels_NT in labels.items()}
    found = Surplus(zeros(layers), {name: zeros(len(size_K), layers, heads) for name, size_K in sizes.items()}, sizes)

    def see(n: int, piece: LayerPiece) -> None:
        surplus_TH = _surplus(piece, positions)
        found.squares_L[piece.layer] += surplus_TH.square().sum()
        for name, labels_NT in labels.items():
            found.by_group[name][:, piece.layer].index_add_(0, labels_NT[n, piece.here], surplus_TH)

    for n, tokens_T in enumerate(sequences_NT):
        read(model, tokens_T[None], partial(see, n))
    return found


def explained_by(found: Surplus, labelling: str) -> list[float | None]:
    """Of each TSSA layer, which share of the surplus' variance the groups explain, as `explained_share`."""
    sums_KLH, sizes_K = found.by_group[labelling], found.sizes[labelling]
    between_L = (sums_KLH.square() / sizes_K[:, None, None]).sum((0, 2))
    count, groups = int(sizes_K.sum()), len(sizes_K)
    return [
        explained_share(total - between, total, count, groups)
        for total, between in zip(found.squares_L.tolist(), between_L.tolist(), strict=True)
    ]


def typical(found: Surplus, labelling: str, *, groups: int, tokens: int, errors: float) -> list[list[Typical]]:
    """Of each head of each TSSA layer, [L][H]: up to so many `groups` whose mean surplus is above 0, and below, by that
    many standard `errors` at least, among those of so many `tokens` at least.

    The standard error is 1/√(tokens of the group): a surplus has variance 1.
    """
    sizes_K = found.sizes[labelling]
    kept_k = (sizes_K >= tokens).nonzero()[:, 0]
    means_kLH = found.by_group[labelling][kept_k] / sizes_K[kept_k, None, None]
    errors_kLH = means_kLH * sizes_K[kept_k, None, None].sqrt()
    order_kLH = errors_kLH.argsort(dim=0, descending=True, stable=True)

    def listed(layer: int, head: int, sign: int) -> list[tuple[int, float]]:
        order_k = order_kLH[:, layer, head].flip(0) if sign < 0 else order_kLH[:, layer, head]
        certain = [i for i in order_k[:groups].tolist() if sign * errors_kLH[i, layer, head] >= errors]
        return [(int(kept_k[i]), float(means_kLH[i, layer, head])) for i in certain]

    _, layers, heads = means_kLH.shape
    return [
        [Typical(listed(layer, head, 1), listed(layer, head, -1)) for head in range(heads)] for layer in range(layers)
    ]


def surplus_of_text(model: TostLM, tokens_T: Tensor, positions: ByPosition) -> Tensor:
    """Of each token of the beginning of one of the sequences, [L, T, H]."""
    surplus_LTH = torch.zeros_like(positions.mean_LTH[:, : len(tokens_T)])

    def see(piece: LayerPiece) -> None:
        surplus_LTH[piece.layer, piece.here] = _surplus(piece, positions)

    read(model, tokens_T[None], see)
    return surplus_LTH


def _surplus(piece: LayerPiece, positions: ByPosition) -> Tensor:
    """Of the piece's only row [T, H]; 0 where Π does not vary at a position."""
    mean_TH, deviation_TH = (x_LTH[piece.layer, piece.here] for x_LTH in (positions.mean_LTH, positions.deviation_LTH))
    return ((piece.pi[0] - mean_TH) / deviation_TH).where(deviation_TH > LEAST_DEVIATION, 0)
