"""Subspaces of a TSSA layer's heads: effective rank, overlap, and the energy of the tokens outside all of them.

U_h [D, C] holds the rows of the input projection that belong to head h. Q_h is the orthonormal basis of these rows.

Shapes: L TSSA layers, T tokens, H heads, D channels per head, C channels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tost_lm.analysis.coding_rate import orthonormal
from tost_lm.analysis.layers import LayerTile, run_in_tiles, tssa_mixers
from tost_lm.model import TostLM
from tost_lm.model.tssa import TssaMixer

MIN_SINGULAR_VALUE = 1e-3  # relative to the largest


class Subspaces(NamedTuple):
    """Plain numbers of one layer."""

    channels: int
    """D."""
    orthogonality: list[float]
    """‖U Uᵀ·D/tr(U Uᵀ) − I‖ / √D (Frobenius) by head: 0 where the rows are orthogonal and of equal norm."""
    effective_rank: list[float]
    """exp of the entropy of the normalised squared singular values by head, from 1 to D."""
    overlap: list[list[float]]
    """‖Q_h Q_kᵀ‖² / D by pair of heads: 1 for the same subspace, 0 for orthogonal subspaces."""
    chance_overlap: float
    """Expected overlap of random subspaces, D / C."""
    spanned: int
    """Rank of the whole projection: its singular values of at least a thousandth of the largest."""
    outside: float
    """Fraction of the tokens' energy (squared norm) in the directions that are not spanned."""


@torch.inference_mode()
def layer_subspaces(model: TostLM, sequences_NT: Tensor) -> list[Subspaces]:
    """The subspaces of each TSSA layer; `outside` is measured on the layer's input for these sequences."""
    mixers = tssa_mixers(model)
    moments_CC = [torch.zeros(()) for _ in mixers]

    def on_tile(tile: LayerTile) -> None:
        z_TC = tile.z_BTC[0].double()
        moments_CC[tile.layer] = moments_CC[tile.layer] + z_TC.T @ z_TC

    for tokens_T in sequences_NT:
        run_in_tiles(model, tokens_T[None], on_tile)
    return [_subspaces(mixer, moment_CC) for mixer, moment_CC in zip(mixers, moments_CC, strict=True)]


def means(layer: Subspaces) -> dict[str, float]:
    """Means over heads; the overlap is averaged over pairs of different heads."""
    overlap_HH = torch.tensor(layer.overlap)
    pairs = len(overlap_HH) * (len(overlap_HH) - 1)
    return {
        "orthogonality": sum(layer.orthogonality) / len(overlap_HH),
        "effective_rank": sum(layer.effective_rank) / len(overlap_HH),
        "overlap": float(overlap_HH.fill_diagonal_(0).sum()) / pairs,
    }


def _subspaces(mixer: TssaMixer, moment_CC: Tensor) -> Subspaces:
    weight_CC = mixer.in_proj.weight.double()
    u_HDC = weight_CC.unflatten(0, (mixer.heads, -1))
    channels = u_HDC.shape[1]
    q_HDC = orthonormal(u_HDC)
    return Subspaces(
        channels,
        orthogonality(u_HDC).tolist(),
        effective_rank(u_HDC).tolist(),
        (torch.einsum("hdc,kec->hkde", q_HDC, q_HDC).square().sum((-1, -2)) / channels).tolist(),
        channels / u_HDC.shape[2],
        *_outside(weight_CC, moment_CC),
    )


def orthogonality(u_HDC: Tensor) -> Tensor:
    """‖U Uᵀ·D/tr(U Uᵀ) − I‖ / √D of each head [H]."""
    gram_HDD, channels = u_HDC @ u_HDC.mT, u_HDC.shape[1]
    scale_H11 = channels / gram_HDD.diagonal(dim1=1, dim2=2).sum(-1)[:, None, None]
    identity = torch.eye(channels, dtype=u_HDC.dtype, device=u_HDC.device)
    return (gram_HDD * scale_H11 - identity).square().sum((1, 2)).sqrt() / channels**0.5


def effective_rank(u_HDC: Tensor) -> Tensor:
    """exp of the entropy of each head's normalised squared singular values [H]."""
    energy_HD = torch.linalg.svdvals(u_HDC).square()
    return torch.special.entr(energy_HD / energy_HD.sum(-1, keepdim=True)).sum(-1).exp()


def _outside(weight_CC: Tensor, moment_CC: Tensor) -> tuple[int, float]:
    _, values_C, directions_CC = torch.linalg.svd(weight_CC)
    is_spanned_C = values_C >= MIN_SINGULAR_VALUE * values_C[0]
    energy_C = torch.einsum("ic,cd,id->i", directions_CC, moment_CC, directions_CC)
    return int(is_spanned_C.sum()), float(energy_C[~is_spanned_C].sum() / energy_C.sum())
