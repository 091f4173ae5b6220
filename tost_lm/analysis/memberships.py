"""How TSSA's heads share tokens out, Π, in a trained model: how unevenly, by position, and whether Π of a token
depends on how much text came before it.

Shapes: N sequences, T tokens, L layers of TSSA, H heads, P stretches of positions.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tost_lm.analysis.layers import tssa_mixers, while_hooked
from tost_lm.data.concatenation import Concatenation
from tost_lm.data.shards import Shards
from tost_lm.errors import DataError
from tost_lm.model import LMState, TostLM
from tost_lm.model.positions import Places, position_ends
from tost_lm.model.tssa import TssaMixer
from tost_lm.ops import TssaState
from tost_lm.ops.naive import memberships, statistics_dtype, token_scores

PIECE_TOKENS = 2048


@dataclass(frozen=True)
class AfterContext:
    """The same tokens after so many tokens of other text; means over these tokens."""

    context_tokens: int
    moved: list[float]
    """Of each TSSA layer: total variation, ½ Σ_h |Π − Π'|, from the memberships after no other text; 0: they are the
    same, 1: other heads have the tokens altogether."""
    concentration: list[float]
    """Of each TSSA layer."""
    nats_per_token: float
    """Their loss."""


class ByPosition(NamedTuple):
    """Of each TSSA layer."""

    concentration: list[list[float]]
    """Means over the sequences and the positions of each stretch of `position_ends`."""
    explained: list[float | None]
    """Which share of Π's variance over the tokens their position alone explains, all heads together: 1 − (variance at
    one position) / (variance over all), both without bias. About 0 where it tells nothing, 1 where it tells all; None
    where Π does not vary, or there is one sequence."""


def concentration(pi_H: Tensor) -> Tensor:
    """1 − entropy over the heads / ln H, […]: 0 where all heads take an equal part in a token, 1 where one takes all.

    Raises:
        ValueError: there is one head only.
    """
    heads = pi_H.shape[-1]
    if heads < 2:
        raise ValueError("one head takes every token whole: there is nothing to share out")
    return 1 - torch.special.entr(pi_H).sum(-1) / math.log(heads)


def read_text(shards: Shards, sequences: int, tokens: int, context_tokens: int) -> tuple[Tensor, Tensor]:
    """Held-out text, documents one after another: sequences [N, tokens] from all over it, and before them a context.

    Raises:
        DataError: there is less text.
    """
    text = Concatenation(shards.token_arrays("valid"))
    if len(text) < context_tokens + sequences * tokens:
        raise DataError(
            f"{shards.folder}: its held-out text has {len(text):,} tokens, and a context of {context_tokens:,} and "
            f"{sequences} sequences of {tokens:,} are wanted: lower memberships.context_tokens or "
            "memberships.sequences, or give more text (heldout.shards=FOLDER)"
        )
    starts = np.linspace(context_tokens, len(text) - tokens, sequences).astype(np.int64)
    drawn = text.read(np.array([0, *starts]), np.array([context_tokens, *[tokens] * sequences]), np.int64)
    context_S, flat = torch.from_numpy(drawn).split([context_tokens, sequences * tokens])
    return flat.view(sequences, tokens), context_S


@torch.inference_mode()
def by_position(model: TostLM, sequences_NT: Tensor) -> ByPosition:
    """How concentrated Π is along the sequences, and how much of it the position alone decides."""
    (sequences, tokens), ends = sequences_NT.shape, position_ends(sequences_NT.shape[1])
    concentration_LT, mean_LTH, squares_LTH = (torch.zeros((), dtype=torch.float64) for _ in range(3))
    for count, tokens_T in enumerate(sequences_NT, start=1):
        pi_LTH = _memberships(model, tokens_T)
        concentration_LT = concentration_LT + concentration(pi_LTH) / sequences
        aside_LTH = pi_LTH - mean_LTH
        mean_LTH = mean_LTH + aside_LTH / count
        squares_LTH = squares_LTH + aside_LTH * (pi_LTH - mean_LTH)
    within_L = squares_LTH.sum((1, 2))
    between_L = sequences * (mean_LTH - mean_LTH.mean(1, keepdim=True)).square().sum((1, 2))
    at_one_L = within_L / (tokens * (sequences - 1)) if sequences > 1 else within_L * torch.nan
    share_L = at_one_L / ((within_L + between_L) / (tokens * sequences - 1))
    return ByPosition(
        torch.stack([concentration_LT[:, a:b].mean(1) for a, b in pairwise([0, *ends])], 1).tolist(),
        [None if math.isnan(share) else 1 - share for share in share_L.tolist()],
    )


@torch.inference_mode()
def after_context(
    model: TostLM, probes_NT: Tensor, context_S: Tensor, amounts: Sequence[int]
) -> Iterator[AfterContext]:
    """The probes after none and after each of the `amounts` of tokens of the context, which is read in pieces.

    Args:
        model: in evaluation mode, and reads sequences as long as both together.
        probes_NT: N sequences; the last token is a label only.
        context_S: other text, at least as long as the largest amount.
        amounts: how many tokens of it, from its beginning; above 0 and rising.
    """
    state, read, unmoved_NLTH = None, 0, None
    for amount in [0, *amounts]:
        state, read = _read(model, context_S[read:amount], state), amount
        probed = [_probe(model, probe_T, state) for probe_T in probes_NT]
        pi_NLTH = torch.stack([pi_LTH for pi_LTH, _ in probed])
        unmoved_NLTH = pi_NLTH if unmoved_NLTH is None else unmoved_NLTH
        moved_NLT = (pi_NLTH - unmoved_NLTH).abs().sum(-1) / 2
        moved, concentrated = (x_NLT.mean((0, 2)).tolist() for x_NLT in (moved_NLT, concentration(pi_NLTH)))
        yield AfterContext(amount, moved, concentrated, sum(nats for _, nats in probed) / len(probed))


@contextmanager
def recorded_inputs(model: TostLM) -> Iterator[list[Tensor]]:
    """What each TSSA layer reads [B, T, C], in the order in which they are called."""
    recorded: list[Tensor] = []
    mixers = tssa_mixers(model)
    with while_hooked(*(m.register_forward_pre_hook(lambda _, inputs: recorded.append(inputs[0])) for m in mixers)):
        yield recorded


@contextmanager
def recorded_memberships(model: TostLM) -> Iterator[list[Tensor]]:
    """Π [B, T, H] of each TSSA layer, in the order in which they are computed while the model is called."""
    recorded: list[Tensor] = []

    def record(mixer: nn.Module, inputs: Any) -> None:
        assert isinstance(mixer, TssaMixer)
        recorded.append(memberships_of(mixer, *inputs))

    with while_hooked(*(mixer.register_forward_pre_hook(record) for mixer in tssa_mixers(model))):
        yield recorded


def memberships_of(mixer: TssaMixer, x_BTC: Tensor, state: TssaState | None, places: Places) -> Tensor:
    """Π [B, T, H] of a layer that is called with these arguments."""
    w_BTHD = mixer.in_proj(x_BTC).unflatten(-1, (mixer.heads, -1))
    dtype = statistics_dtype(w_BTHD)
    w_sq_BTHD = w_BTHD.to(dtype).square()
    energy_BTHD = w_sq_BTHD.cumsum(1)
    count_BT = torch.arange(1, x_BTC.shape[1] + 1, device=x_BTC.device).expand(x_BTC.shape[:2])
    if state is not None:
        energy_BTHD = energy_BTHD + state.energy[:, None].to(dtype)
        count_BT = count_BT + state.count[:, None]
    bias_HT = mixer.bias_of(places)
    bias_TH = None if bias_HT is None else bias_HT.mT.to(dtype)
    z_BTH = token_scores(w_sq_BTHD, energy_BTHD, count_BT, mixer.temp.to(dtype), bias_TH, mixer.membership)
    return memberships(z_BTH, mixer.membership)


def _memberships(model: TostLM, tokens_T: Tensor) -> Tensor:
    """[L, T, H] of one sequence, float64."""
    with recorded_memberships(model) as recorded:
        model(tokens_T[None], output_state=False)
    return torch.cat(recorded).double()


def _probe(model: TostLM, probe_T: Tensor, state: LMState | None) -> tuple[Tensor, float]:
    """Memberships [L, T, H] of tokens after `state`, float64, and their loss."""
    with recorded_memberships(model) as recorded:
        loss = model(probe_T[None, :-1], labels=probe_T[None, 1:], state=state, output_state=False).loss
    assert loss is not None
    return torch.cat(recorded).double(), loss.item()


def _read(model: TostLM, tokens_S: Tensor, state: LMState | None) -> LMState | None:
    for piece_T in tokens_S.split(PIECE_TOKENS) if len(tokens_S) else ():
        state = model(piece_T[None], state=state).state
    return state
