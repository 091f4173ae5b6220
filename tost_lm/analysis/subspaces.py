"""The subspaces that a TSSA layer projects tokens into, and what of its tokens lies in none of them.

U_h [D, C] is the block of the input projection that belongs to head h, Q_h the orthonormal basis of its rows.

Shapes: L layers of TSSA, T tokens, H heads, D channels per head, C channels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tost_lm.analysis.coding_rate import orthonormal
from tost_lm.analysis.layers import LayerPiece, read, tssa_mixers
from tost_lm.model import TostLM
from tost_lm.model.tssa import TssaMixer

NUMERICALLY_NONE = 1e-3


class Subspaces(NamedTuple):
    """Of one layer; plain numbers."""

    channels: int
    """D."""
    orthogonality: list[float]
    """Of each head, ‖U Uᵀ·D/tr(U Uᵀ) − I‖ / √D (Frobenius): 0 where its rows are orthogonal and of one length."""
    effective_rank: list[float]
    """Of each head, exp of the entropy of its squared singular values' shares, 1 to D."""
    overlap: list[list[float]]
    """Of each pair of heads, ‖Q_h Q_kᵀ‖² / D: 1 the same subspace, 0 orthogonal ones."""
    chance_overlap: float
    """Of two random subspaces of that size, D / C."""
    spanned: int
    """Dimensions of the input that the heads together project: singular values of the whole projection that are at
    least a thousandth of the largest."""
    outside: float
    """Which share of the tokens' squared length lies in the dimensions that are not spanned."""


@torch.inference_mode()
def layer_subspaces(model: TostLM, sequences_NT: Tensor) -> list[Subspaces]:
    """Those of each TSSA layer, in their order; `outside` is of the tokens that the layer reads in these sequences."""
    mixers = tssa_mixers(model)
    moments_CC = [torch.zeros(()) for _ in mixers]

    def see(piece: LayerPiece) -> None:
        z_TC = piece.z_BTC[0].double()
        moments_CC[piece.layer] = moments_CC[piece.layer] + z_TC.T @ z_TC

    for tokens_T in sequences_NT:
        read(model, tokens_T[None], see)
    return [_subspaces(mixer, moment_CC) for mixer, moment_CC in zip(mixers, moments_CC, strict=True)]


def means(layer: Subspaces) -> dict[str, float]:
    """Over the heads, of overlap over the pairs of different ones."""
    overlap_HH = torch.tensor(layer.overlap)
    pairs = len(overlap_HH) * (len(overlap_HH) - 1)
    return {
        "orthogonality": sum(layer.orthogonality) / len(overlap_HH),
        "effective_rank": sum(layer.effective_rank) / len(overlap_HH),
        "overlap": float(overlap_HH.fill_diagonal_(0).sum()) / pairs,
    }


def _subspaces(mixer: TssaMixer, moment_CC: Tensor) -> Subspaces:
    """`moment_CC`: Σ z zᵀ of the tokens."""
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
    """exp of the entropy of the squared singular values' shares, of each head [H]."""
    share_HD = torch.linalg.svdvals(u_HDC).square()
    return torch.special.entr(share_HD / share_HD.sum(-1, keepdim=True)).sum(-1).exp()


def _outside(weight_CC: Tensor, moment_CC: Tensor) -> tuple[int, float]:
    _, values_C, directions_CC = torch.linalg.svd(weight_CC)
    is_spanned_C = values_C >= NUMERICALLY_NONE * values_C[0]
    energy_C = torch.einsum("ic,cd,id->i", directions_CC, moment_CC, directions_CC)
    return int(is_spanned_C.sum()), float(energy_C[~is_spanned_C].sum() / energy_C.sum())
