"""The residual stream in front of the TSSA layers: which tokens are long in it, and what becomes of rare ones.

Shapes: N sequences, T tokens, L layers of TSSA, G groups of tokens by their information.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from tost_lm.analysis.layers import LayerPiece, read, tssa_mixers
from tost_lm.analysis.memberships import concentration
from tost_lm.model import TostLM

LONG = 3.0


class Followed(NamedTuple):
    """A group of tokens through the layers; means over its tokens, of each TSSA layer."""

    from_nats: float
    to_nats: float
    """Between which their information lies; a token tells −ln of its word's share of the text."""
    tokens: int
    update: list[float]
    """‖what the layer's branch adds‖ / ‖residual stream before it‖."""
    concentration: list[float]
    """Of the memberships."""
    kept: list[float]
    """Cosine between the residual stream before the layer and before the first TSSA layer."""


class Lengths(NamedTuple):
    """Of the residual stream before one TSSA layer: Euclidean norms of tokens."""

    median: float
    long_share: float
    """Of the tokens, those longer than `LONG` medians."""
    longest: list[tuple[int, int, float]]
    """The sequence, the position, and how many medians long."""


def follow(
    model: TostLM, sequences_NT: Tensor, information_NT: Tensor, groups: int, longest: int
) -> tuple[list[Followed], list[Lengths]]:
    """Groups of about equally many tokens, the rarest last; and of each TSSA layer the lengths with the `longest`.

    Tokens of one word are of one group, so there are fewer groups where one word makes up much of the text.
    """
    edges = np.quantile(information_NT.cpu().numpy(), np.arange(1, groups) / groups)
    stretch_NT = torch.bucketize(information_NT, torch.from_numpy(np.unique(edges)).to(information_NT.device))
    group_NT = stretch_NT.unique(return_inverse=True)[1]
    sizes_G = group_NT.flatten().bincount()
    layers = len(tssa_mixers(model))
    sums_FGL = torch.zeros(3, len(sizes_G), layers, dtype=torch.float64, device=sequences_NT.device)
    norms_LNT = torch.zeros(layers, *sequences_NT.shape, device=sequences_NT.device)
    first_piece: list[Tensor] = []

    def see(n: int, piece: LayerPiece) -> None:
        x_TC = piece.x_BTC[0].double()
        if piece.layer == 0:
            first_piece[:] = [x_TC]
        norm_T = x_TC.norm(dim=-1)
        norms_LNT[piece.layer, n, piece.here] = norm_T.to(norms_LNT.dtype)
        figures = (
            piece.branch[0].double().norm(dim=-1) / norm_T,
            concentration(piece.pi[0]),
            cosine_similarity(x_TC, first_piece[0], dim=-1),
        )
        for sums_GL, figure_T in zip(sums_FGL, figures, strict=True):
            sums_GL[:, piece.layer].index_add_(0, group_NT[n, piece.here], figure_T)

    for n, tokens_T in enumerate(sequences_NT):
        read(model, tokens_T[None], partial(see, n))
    updates, concentrations, kept = (sums_FGL / sizes_G[:, None]).tolist()
    followed = [
        Followed(*_range(information_NT[group_NT == group]), size, updates[group], concentrations[group], kept[group])
        for group, size in enumerate(sizes_G.tolist())
    ]
    return followed, [_lengths(norms_NT, longest) for norms_NT in norms_LNT]


def _range(information_M: Tensor) -> tuple[float, float]:
    return float(information_M.min()), float(information_M.max())


def _lengths(norms_NT: Tensor, longest: int) -> Lengths:
    median = float(norms_NT.median())
    values, places = norms_NT.flatten().topk(min(longest, norms_NT.numel()))
    tokens = norms_NT.shape[1]
    return Lengths(
        median,
        float((norms_NT > LONG * median).double().mean()),
        [
            (place // tokens, place % tokens, value / median)
            for place, value in zip(places.tolist(), values.tolist(), strict=True)
        ],
    )
