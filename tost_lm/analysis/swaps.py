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
from typing import Any

import torch
from torch import Tensor

from tost_lm.analysis.layers import tssa_mixers, while_hooked
from tost_lm.analysis.memberships import memberships_of, recorded_memberships
from tost_lm.model import TostLM
from tost_lm.model.tssa import TssaMixer
from tost_lm.ops import TssaState
from tost_lm.ops.naive import MASS_FLOOR, statistics_dtype

AS_IT_IS, UNIFORM, BY_POSITION, CONSTANT = "as it is", "uniform", "by position", "constant moments"

Parts = tuple[Tensor, Tensor]
"""Π [1, T, H] and D, [1, T, H, D] or [H, D]."""
Swap = Callable[[int, Tensor, Tensor], Parts]
"""From the layer's number from 0 on, w [1, T, H, D] and Π as it is, to what takes the place of Π and D."""


@torch.inference_mode()
def swapped_losses(model: TostLM, sequences_NT: Tensor) -> dict[str, Tensor]:
    """Mean nats per token of each sequence [N], float64, as it is and with each part taken from all TSSA layers; of a
    single sequence without the two that need others."""

    def uniform(layer: int, w_1THD: Tensor, pi_1TH: Tensor) -> Parts:
        even_1TH = torch.full_like(pi_1TH, 1 / pi_1TH.shape[-1])
        return even_1TH, second_moments(w_1THD, even_1TH)

    losses = {AS_IT_IS: _losses(model, sequences_NT)}
    with swapped(model, uniform):
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
    def by_position(layer: int, w_1THD: Tensor, pi_1TH: Tensor) -> Parts:
        mean_1TH = positions_LTH[layer, : pi_1TH.shape[1]].to(pi_1TH.dtype)[None]
        return mean_1TH, second_moments(w_1THD, mean_1TH)

    def constant(layer: int, w_1THD: Tensor, pi_1TH: Tensor) -> Parts:
        return pi_1TH, moments_LHD[layer].to(pi_1TH.dtype)

    return {BY_POSITION: by_position, CONSTANT: constant}


def beside_as_it_is(losses: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """For each, in plain numbers: its name, nats_per_token, the mean change from the model as it is, and the standard
    error of that over the sequences (None: there is one)."""
    rows = []
    for name, loss_N in losses.items():
        change_N = loss_N - losses[AS_IT_IS]
        error = float(change_N.std() / len(change_N) ** 0.5) if len(change_N) > 1 else None
        means = {"nats_per_token": float(loss_N.mean()), "change": float(change_N.mean())}
        rows.append({"name": name, **means, "standard_error": error})
    return rows


@contextmanager
def swapped(model: TostLM, swap: Swap) -> Iterator[None]:
    """While the block lasts the TSSA layers compute −Π w / (1 + D) from what `swap` gives; for one row, no state."""

    def hook_of(layer: int) -> Callable[..., Any]:
        def compute(mixer: TssaMixer, arguments: Any, result: Any) -> Any:
            x_1TC, state, places = arguments
            w_1THD = mixer.in_proj(x_1TC).unflatten(-1, (mixer.heads, -1))
            w_1THD = w_1THD.to(statistics_dtype(w_1THD))
            pi_1TH, moment = swap(layer, w_1THD, memberships_of(mixer, x_1TC, state, places))
            y_1THD = -pi_1TH[..., None] * w_1THD / (1 + moment)
            return mixer.out_proj(y_1THD.flatten(-2).to(x_1TC.dtype)), result[1]

        return compute

    mixers = tssa_mixers(model)
    with while_hooked(*(mixer.register_forward_hook(hook_of(layer)) for layer, mixer in enumerate(mixers))):
        yield


def second_moments(w_1THD: Tensor, pi_1TH: Tensor) -> Tensor:
    """D_t of each token, [1, T, H, D]."""
    weighted_1THD = (pi_1TH[..., None] * w_1THD.square()).cumsum(1)
    return weighted_1THD / (pi_1TH.cumsum(1) + MASS_FLOOR)[..., None]


def _means(model: TostLM, sequences_NT: Tensor) -> tuple[Tensor, Tensor]:
    """Over the sequences: Π [L, T, H] and D at the last token [L, H, D], float64."""
    positions_LTH, moments_LHD = torch.zeros(()), torch.zeros(())
    for tokens_T in sequences_NT:
        with recorded_memberships(model) as recorded:
            states = model(tokens_T[None]).state
        assert states is not None
        ends = [layer for layer in states.layers if isinstance(layer, TssaState)]
        positions_LTH = positions_LTH + torch.cat(recorded).double() / len(sequences_NT)
        of_ends = [(end.weighted_energy / (end.mass + MASS_FLOOR)[..., None])[0].double() for end in ends]
        moments_LHD = moments_LHD + torch.stack(of_ends) / len(sequences_NT)
    return positions_LTH, moments_LHD


def _losses(model: TostLM, sequences_NT: Tensor) -> Tensor:
    found = []
    for tokens_T in sequences_NT:
        loss = model(tokens_T[None, :-1], labels=tokens_T[None, 1:], output_state=False).loss
        assert loss is not None
        found.append(loss.double().cpu())
    return torch.stack(found)
