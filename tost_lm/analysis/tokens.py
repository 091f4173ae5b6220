"""Which tokens the heads take: the surplus of a token, by how many standard deviations Π lies above its mean at that
position in the other sequences, for each head. The deviations are those of the stretch of positions: so late tokens,
whose Π varies far less, count as early ones do.

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

    sequences: int
    squares_L: Tensor
    """Over the heads as well."""
    by_group: dict[str, Tensor]
    """Of each labelling [K, L, H]."""
    sizes: dict[str, Tensor]
    """Of the groups of each labelling [K], in tokens; none is empty."""


class Typical(NamedTuple):
    """Of one head of one layer: groups of tokens by their mean surplus."""

    most: list[tuple[int, float]]
    """The largest, with the numbers of their groups."""
    least: list[tuple[int, float]]
    """The smallest."""


def surpluses(model: TostLM, sequences_NT: Tensor, positions: ByPosition, labels: Mapping[str, Tensor]) -> Surplus:
    """Those of all tokens of the sequences.

    Args:
        positions: of these sequences.
        labels: the number of each token's group [N, T], int64, 0 to K − 1 without a gap; of each labelling.
    """
    layers, _, heads = positions.mean_LTH.shape
    zeros = partial(torch.zeros, dtype=torch.float64, device=sequences_NT.device)
    sizes = {name: labels_NT.flatten().bincount() for name, labels_NT in labels.items()}
    by_group = {name: zeros(len(size_K), layers, heads) for name, size_K in sizes.items()}
    found = Surplus(len(sequences_NT), zeros(layers), by_group, sizes)

    def see(n: int, piece: LayerPiece) -> None:
        surplus_TH = _surplus(piece, positions)
        found.squares_L[piece.layer] += surplus_TH.square().sum()
        for name, labels_NT in labels.items():
            found.by_group[name][:, piece.layer].index_add_(0, labels_NT[n, piece.here], surplus_TH)

    for n, tokens_T in enumerate(sequences_NT):
        read(model, tokens_T[None], partial(see, n))
    return found


def explained_by(found: Surplus, labelling: str) -> list[float | None]:
    """Of each TSSA layer, which share of the variance of Π at a position the groups explain, as `explained_share`.

    Of the surplus' variance 1/N is that of the mean beside which it stands, which no group explains: the share is of
    the rest.
    """
    sums_KLH, sizes_K = found.by_group[labelling], found.sizes[labelling]
    between_L = (sums_KLH.square() / sizes_K[:, None, None]).sum((0, 2))
    count, groups = int(sizes_K.sum()), len(sizes_K)
    shares = [
        explained_share(total - between, total, count, groups)
        for total, between in zip(found.squares_L.tolist(), between_L.tolist(), strict=True)
    ]
    return [None if share is None else share * found.sequences / (found.sequences - 1) for share in shares]


def typical(found: Surplus, labelling: str, *, groups: int, tokens: int, errors: float) -> list[list[Typical]]:
    """Of each head of each TSSA layer, [L][H]: up to so many `groups` of the largest mean surplus and of the smallest,
    among those of so many `tokens` at least that are that many standard `errors` above 0, or below.

    The standard error is that of as many tokens drawn by lot.
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
    """Of each token of the beginning of one of the sequences, [L, T, H]."""
    surplus_LTH = torch.zeros_like(positions.mean_LTH[:, : len(tokens_T)])

    def see(piece: LayerPiece) -> None:
        surplus_LTH[piece.layer, piece.here] = _surplus(piece, positions)

    read(model, tokens_T[None], see)
    return surplus_LTH


def _surplus(piece: LayerPiece, positions: ByPosition) -> Tensor:
    """Of the piece's only row [T, H]; 0 where Π does not vary."""
    deviation_PH = positions.deviation_LPH[piece.layer]
    per_deviation_PH = (1 / deviation_PH).where(deviation_PH > LEAST_DEVIATION, 0)
    others = positions.sequences / max(positions.sequences - 1, 1)  # the mean of all is by 1/N the token's own
    beside_TH = piece.pi[0] - positions.mean_LTH[piece.layer, piece.here]
    return others * beside_TH * per_deviation_PH[positions.stretch_T[piece.here]]
