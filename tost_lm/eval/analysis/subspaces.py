"""Subspaces of a TSSA layer's heads: effective rank, overlap, and the energy of the tokens outside all of them.

U_h [D, C] holds the rows of the input projection that belong to head h. Q_h is the orthonormal basis of these rows.

Shapes: L TSSA layers, T tokens, H heads, D channels per head, C channels.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tost_lm.eval.analysis.coding_rate import orthonormal
from tost_lm.eval.analysis.layers import LayerTile, run_in_tiles, tssa_mixers
from tost_lm.eval.analysis.memberships import Analysis
from tost_lm.inference.protocol_names import SUBSPACES
from tost_lm.markdown import table
from tost_lm.mixers.tssa.layer import TssaMixer
from tost_lm.model import TostLM
from tost_lm.report.page import Chart, Page, new_panels, number_ticks, select_layers
from tost_lm.report.protocols import analysis_section

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


def measure(of: Analysis) -> dict[str, Any]:
    """Subspaces of each TSSA layer, with their means over heads."""
    layers = layer_subspaces(of.model, of.sequences)
    return {"layers": [{**layer._asdict(), "mean": means(layer)} for layer in layers]}


@analysis_section("Subspaces", SUBSPACES)
def section(results: dict[str, Any], page: Page) -> list[str]:
    """Rank, orthogonality and overlap of the heads' subspaces."""
    rows = [
        (
            str(number),
            f"{layer['mean']['effective_rank']:.1f} of {layer['channels']}",
            f"{layer['mean']['orthogonality']:.3f}",
            f"{layer['mean']['overlap']:.3f} ({layer['chance_overlap']:.3f})",
            f"{layer['spanned']:,}",
            f"{layer['outside']:.2%}",
        )
        for number, layer in enumerate(results["layers"], 1)
    ]
    return [
        page.add_figure("subspaces", overlap_chart(results["layers"]), "Overlap of the heads' subspaces"),
        table(
            ("TSSA layer", "effective rank", "non-orthogonality", "overlap (chance)", "rank of all heads", "outside"),
            rows,
        ),
        "Means over heads. Overlap is a mean over pairs of heads: 0 for orthogonal subspaces, 1 for the same subspace. "
        "Non-orthogonality is 0 where a head's rows are orthogonal and of equal norm. Outside is the fraction of the "
        "tokens' energy in directions that no head projects.",
    ]


def overlap_chart(layers: Sequence[Mapping[str, Any]]) -> Chart:
    """Overlap of each pair of heads, in some layers."""
    chosen = select_layers(len(layers))
    overlap_LHH = np.array([layer["overlap"] for layer in layers])[chosen]
    overlap_LHH[:, np.eye(overlap_LHH.shape[-1], dtype=bool)] = np.nan
    figure, panels = new_panels(1.4 + 2.4 * len(chosen), 2.9, len(chosen))
    image: Any = None
    for axes, number, overlap_HH in zip(panels, chosen, overlap_LHH, strict=True):
        image = axes.imshow(overlap_HH, cmap="cividis", vmin=0, vmax=np.nanmax(overlap_LHH))
        number_ticks(axes.xaxis, len(overlap_HH), 0)
        number_ticks(axes.yaxis, len(overlap_HH), 0)
        axes.set_xlabel("head")
        axes.set_title(f"TSSA layer {number + 1}", fontsize=10)
    panels[0].set_ylabel("head")
    chance = layers[0]["chance_overlap"]
    figure.colorbar(image, ax=panels, label=f"overlap (1: same subspace,\nchance {chance:.3f})")
    rows = [
        [number, head + 1, other + 1, overlap]
        for number, layer in enumerate(layers, start=1)
        for head, overlaps in enumerate(layer["overlap"])
        for other, overlap in enumerate(overlaps)
    ]
    return Chart(figure, ["TSSA layer", "head", "other head", "overlap (1)"], rows)
