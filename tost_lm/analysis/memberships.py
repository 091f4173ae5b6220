"""How TSSA's heads share tokens out, Π, in a trained model: how unevenly, by position, and whether Π of a token
depends on how much text came before it.

Shapes: N sequences, T tokens, L layers of TSSA, H heads, P stretches of positions.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tost_lm.analysis.layers import LayerPiece, read, tssa_mixers, watched
from tost_lm.model import LMState, TostLM
from tost_lm.model.positions import position_ends

LEAST_DEVIATION = 1e-7
"""Of memberships: below it there is nothing but rounding, of scores in float32."""


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
    """Of each TSSA layer. Stretches of positions end at `position_ends`."""

    concentration: list[list[float]]
    """By stretch."""
    spread: list[list[float]]
    """By stretch: how far the scores z of one token lie apart, their standard deviation over the heads, in nats."""
    explained: list[float | None]
    """Which share of Π's variance over the tokens their position alone explains, as `explained_share`, all heads
    together."""
    explained_within: list[list[float | None]]
    """The same of the tokens of one stretch alone."""
    sequences: int
    mean_LTH: Tensor
    """Π, the mean at each position over the sequences."""
    deviation_LPH: Tensor
    """Π, the standard deviation about that mean, of one sequence 0."""
    stretch_T: Tensor
    """The number of each position's stretch, from 0 on."""


def concentration(pi_H: Tensor) -> Tensor:
    """1 − entropy over the heads / ln H, […]: 0 where all heads take an equal part in a token, 1 where one takes all.

    Raises:
        ValueError: there is one head only.
    """
    heads = pi_H.shape[-1]
    if heads < 2:
        raise ValueError("one head takes every token whole: there is nothing to share out")
    return 1 - torch.special.entr(pi_H).sum(-1) / math.log(heads)


def by_position(model: TostLM, sequences_NT: Tensor) -> ByPosition:
    """How concentrated Π is along the sequences, and how much of it the position alone decides."""
    found = _ByPosition(model, sequences_NT)
    for tokens_T in sequences_NT:
        found.count += 1
        read(model, tokens_T[None], found.see)
    return found.summed_up()


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
    state, so_far, unmoved_NLTH = None, 0, None
    for amount in [0, *amounts]:
        if amount:
            state, so_far = read(model, context_S[None, so_far:amount], lambda _: None, state), amount
        probed = [_probe(model, probe_T, state) for probe_T in probes_NT]
        pi_NLTH = torch.stack([pi_LTH for pi_LTH, _ in probed])
        unmoved_NLTH = pi_NLTH if unmoved_NLTH is None else unmoved_NLTH
        moved_NLT = (pi_NLTH - unmoved_NLTH).abs().sum(-1) / 2
        moved, concentrated = (x_NLT.mean((0, 2)).tolist() for x_NLT in (moved_NLT, concentration(pi_NLTH)))
        yield AfterContext(amount, moved, concentrated, sum(nats for _, nats in probed) / len(probed))


@contextmanager
def recorded_memberships(model: TostLM) -> Iterator[list[Tensor]]:
    """Π [B, T, H] of each TSSA layer, in the order in which they are computed while the model is called."""
    recorded: list[Tensor] = []
    with watched(model, lambda piece: recorded.append(piece.pi)):
        yield recorded


class _ByPosition:
    """Sums over the sequences so far; those over squares as they come, beside the mean until then (Welford)."""

    def __init__(self, model: TostLM, sequences_NT: Tensor) -> None:
        layers = len(tssa_mixers(model))
        self.sequences, tokens = sequences_NT.shape
        zeros = partial(torch.zeros, dtype=torch.float64, device=sequences_NT.device)
        self.ends = torch.tensor(position_ends(tokens), device=sequences_NT.device)
        self.count = 0
        self.mean_LTH = zeros(layers, tokens, model.config.heads)
        self.squares_LPH = zeros(layers, len(self.ends), model.config.heads)
        self.concentration_LP, self.spread_LP = zeros(layers, len(self.ends)), zeros(layers, len(self.ends))
        self.stretch_T = torch.bucketize(torch.arange(tokens, device=sequences_NT.device) + 1, self.ends)

    def see(self, piece: LayerPiece) -> None:
        pi_TH, mean_TH = piece.pi[0], self.mean_LTH[piece.layer, piece.here]
        stretch_T = self.stretch_T[piece.here]
        self.concentration_LP[piece.layer].index_add_(0, stretch_T, concentration(pi_TH))
        self.spread_LP[piece.layer].index_add_(0, stretch_T, piece.scores[0].std(-1, correction=0))
        aside_TH = pi_TH - mean_TH
        mean_TH += aside_TH / self.count
        self.squares_LPH[piece.layer].index_add_(0, stretch_T, aside_TH * (pi_TH - mean_TH))

    def summed_up(self) -> ByPosition:
        lengths_P = self.ends.diff(prepend=self.ends.new_zeros(1))
        concentration_LP, spread_LP = (
            x_LP / (self.sequences * lengths_P) for x_LP in (self.concentration_LP, self.spread_LP)
        )
        variance_LPH = self.squares_LPH / (lengths_P[:, None] * max(self.sequences - 1, 1))
        stretches = [slice(*ends) for ends in pairwise([0, *self.ends.tolist()])]
        layers = range(len(self.mean_LTH))
        return ByPosition(
            concentration_LP.tolist(),
            spread_LP.tolist(),
            [self._explained(layer, slice(None), slice(None)) for layer in layers],
            [[self._explained(layer, p, stretch) for p, stretch in enumerate(stretches)] for layer in layers],
            self.sequences,
            self.mean_LTH,
            variance_LPH.sqrt(),
            self.stretch_T,
        )

    def _explained(self, layer: int, stretches: int | slice, positions: slice) -> float | None:
        mean_TH, within = self.mean_LTH[layer, positions], float(self.squares_LPH[layer, stretches].sum())
        between = self.sequences * float((mean_TH - mean_TH.mean(0)).square().sum())
        return explained_share(within, within + between, self.sequences * len(mean_TH), len(mean_TH))


def explained_share(within: float, total: float, count: int, groups: int) -> float | None:
    """Which share of a variance groups explain: 1 − (variance within them) / (variance), both without bias. About 0
    for groups drawn by lot, 1 where all members of one group are equal.

    Args:
        within: squares about the groups' means, summed.
        total: squares about the mean, summed.
        count: how many members there are.
        groups: how many groups.

    Returns:
        None where nothing varies but by rounding, or no group has two members.
    """
    if total <= count * LEAST_DEVIATION**2 or count <= groups:
        return None
    return 1 - (within / (count - groups)) / (total / (count - 1))


def _probe(model: TostLM, probe_T: Tensor, state: LMState | None) -> tuple[Tensor, float]:
    """Memberships [L, T, H] of tokens after `state`, and their loss."""
    with recorded_memberships(model) as recorded:
        loss = model(probe_T[None, :-1], labels=probe_T[None, 1:], state=state, output_state=False).loss
    assert loss is not None
    return torch.cat(recorded), loss.item()
