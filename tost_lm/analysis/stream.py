"""Residual stream before the TSSA layers: token norms, and statistics of frequent and rare tokens.

Shapes: N sequences, T tokens, L TSSA layers, G groups of tokens by their information.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from tost_lm.analysis.layers import LayerTile, run_in_tiles, tssa_mixers
from tost_lm.analysis.memberships import concentration
from tost_lm.model import TostLM

LARGE_NORM_MEDIANS = 3.0


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
