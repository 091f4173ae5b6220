"""What the loss becomes when a part of the operator is taken away from a trained model, nothing else changed.

    as it is         y_t = −Π_t w_t / (1 + D_t),  D_t = Σ_{s≤t} Π_s w_s² / Σ_{s≤t} Π_s
    uniform          every Π is 1/H, in the moments too
    by position      Π_t is its mean over other sequences at that position, in the moments too
    constant moments D_t is the mean over other sequences of D at their last token

The other sequences are the even ones for the odd, and the odd for the even.

Shapes: N sequences, T tokens, L layers of TSSA, H heads, D channels per head.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tost_lm.analysis.errors import standard_error
from tost_lm.analysis.layers import PIECE_TOKENS, LayerPiece, projected, read, scores_of, tssa_mixers, while_hooked
from tost_lm.model import TostLM
from tost_lm.model.tssa import TssaMixer
from tost_lm.ops import TssaState
from tost_lm.ops.naive import MASS_FLOOR, memberships, statistics_dtype

AS_IT_IS, UNIFORM, BY_POSITION, CONSTANT = "as it is", "uniform", "by position", "constant moments"

Swap = Callable[[int, slice, Tensor], tuple[Tensor, Tensor | None]]
"""From the layer's number from 0 on, where the tokens stand and Π [1, T, H] as it is, to what takes the place of Π and
of D, [H, D]; None: D is made of that Π."""


@torch.inference_mode()
def swapped_losses(model: TostLM, sequences_NT: Tensor) -> dict[str, Tensor]:
    """Mean nats per token of each sequence [N], float64, as it is and with each part taken from all TSSA layers; of a
    single sequence without the two that need others."""
    losses = {AS_IT_IS: _losses(model, sequences_NT)}
    with swapped(model, lambda layer, here, pi_1TH: (torch.full_like(pi_1TH, 1 / pi_1TH.shape[-1]), None)):
        losses[UNIFORM] = _losses(model, sequences_NT)
    if len(sequences_NT) > 1:
        losses |= {name: torch.empty_like(losses[AS_IT_IS]) for name in (BY_POSITION, CONSTANT)}
        for half in (0, 1):
            means = _means(model, sequences_NT[1 - half :: 2])
            for name, swap in _of_means(*means).items():
                with swapped(model, swap):
                    losses[name][half::2] = _losses(model, sequences_NT[half::2])
    return losses


def _of_means(positions_LTH: Tensor, moments_LHD: Tensor) -> dict[str, Swap]:
    return {
        BY_POSITION: lambda layer, here, pi_1TH: (positions_LTH[layer, here].to(pi_1TH.dtype)[None], None),
        CONSTANT: lambda layer, here, pi_1TH: (pi_1TH, moments_LHD[layer].to(pi_1TH.dtype)),
    }


def beside_as_it_is(losses: Mapping[str, Tensor], documents_N: Tensor) -> list[dict[str, Any]]:
    """For each, in plain numbers: its name, nats_per_token, the mean change from the model as it is, and the standard
    error of that over the documents (None: there is one)."""
    rows = []
    for name, loss_N in losses.items():
        change_N = loss_N - losses[AS_IT_IS]
        error = standard_error(change_N, documents_N)
        means = {"nats_per_token": float(loss_N.mean()), "change": float(change_N.mean())}
        rows.append({"name": name, **means, "standard_error": None if error is None else float(error)})
    return rows


@contextmanager
def swapped(model: TostLM, swap: Swap) -> Iterator[None]:
    """While the block lasts the TSSA layers compute −Π w / (1 + D) from what `swap` gives; for one row at a time, which
    may be read in pieces."""
    sums: dict[int, tuple[Tensor, Tensor]] = {}

    def compute(layer: int, mixer: TssaMixer, arguments: Any, result: Any) -> Any:
        z_1TC, state, places = arguments
        w_1THD = projected(mixer, z_1TC)
        w_1THD = w_1THD.to(statistics_dtype(w_1THD))
        here = slice(places.starts[0], places.starts[0] + w_1THD.shape[1])
        pi_1TH = memberships(scores_of(mixer, w_1THD, state, places), mixer.membership)
        pi_1TH, moment = swap(layer, here, pi_1TH)
        if moment is None:
            before = sums[layer] if here.start else None
            weighted_1THD, mass_1TH = _running_sums(w_1THD, pi_1TH, before)
            sums[layer] = weighted_1THD[:, -1:], mass_1TH[:, -1:]
            moment = weighted_1THD / (mass_1TH + MASS_FLOOR)[..., None]
        y_1THD = -pi_1TH[..., None] * w_1THD / (1 + moment)
        return mixer.out_proj(y_1THD.flatten(-2).to(z_1TC.dtype)), result[1]

    mixers = tssa_mixers(model)
    with while_hooked(*(mixer.register_forward_hook(partial(compute, i)) for i, mixer in enumerate(mixers))):
        yield


def _running_sums(w_1THD: Tensor, pi_1TH: Tensor, before: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Σ Π w² [1, T, H, D] and Σ Π [1, T, H] up to each token, from the sums before the first on."""
    weighted_1THD, mass_1TH = (pi_1TH[..., None] * w_1THD.square()).cumsum(1), pi_1TH.cumsum(1)
    return (weighted_1THD, mass_1TH) if before is None else (before[0] + weighted_1THD, before[1] + mass_1TH)


def _means(model: TostLM, sequences_NT: Tensor) -> tuple[Tensor, Tensor]:
    """Over the sequences: Π [L, T, H] and D at the last token [L, H, D], float64."""
    (sequences, tokens), layers = sequences_NT.shape, len(tssa_mixers(model))
    shape = (layers, tokens, model.config.heads)
    positions_LTH = torch.zeros(shape, dtype=torch.float64, device=sequences_NT.device)
    moments_LHD = torch.zeros(())

    def see(piece: LayerPiece) -> None:
        positions_LTH[piece.layer, piece.here] += piece.pi[0] / sequences

    for tokens_T in sequences_NT:
        states = read(model, tokens_T[None], see).layers
        ends = [layer for layer in states if isinstance(layer, TssaState)]
        of_ends = [(end.weighted_energy / (end.mass + MASS_FLOOR)[..., None])[0].double() for end in ends]
        moments_LHD = moments_LHD + torch.stack(of_ends) / sequences
    return positions_LTH, moments_LHD


def _losses(model: TostLM, sequences_NT: Tensor) -> Tensor:
    """Mean nats of each sequence [N]."""
    return torch.stack(
        [torch.cat(list(model.stream(tokens_T, piece_tokens=PIECE_TOKENS))).mean() for tokens_T in sequences_NT]
    )
