"""Memberships Π of a trained model: their concentration by position, and their change after more context.

Shapes: N sequences, T tokens, L TSSA layers, H heads, P position bins.
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

from tost_lm.analysis.layers import LayerTile, observe_layers, run_in_tiles, tssa_mixers
from tost_lm.model import LMState, TostLM
from tost_lm.model.positions import position_ends

MIN_DEVIATION = 1e-7
"""A standard deviation of memberships below this is rounding error of float32 scores."""


@dataclass(frozen=True)
class AfterContext:
    """The probe tokens after `context_tokens` tokens of other text; means over the probe tokens."""

    context_tokens: int
    moved: list[float]
    """Total variation distance ½ Σ_h |Π − Π'| from the memberships without context, by TSSA layer; from 0 to 1."""
    concentration: list[float]
    """By TSSA layer."""
    nats_per_token: float
    """Loss of the probe tokens."""


class ByPosition(NamedTuple):
    """Statistics by TSSA layer. `position_ends` are the last positions of the bins."""

    concentration: list[list[float]]
    """[L][P]."""
    spread: list[list[float]]
    """Standard deviation of a token's scores z over the heads in nats, [L][P]."""
    explained: list[float | None]
    """Fraction of Π's variance that the position explains (`explained_fraction`), over all heads."""
    explained_within: list[list[float | None]]
    """The same within each bin, [L][P]."""
    sequences: int
    mean_LTH: Tensor
    """Mean of Π at each position over the sequences."""
    deviation_LPH: Tensor
    """Standard deviation of Π about that mean; 0 for a single sequence."""
    bin_T: Tensor
    """Index of each position's bin, from 0."""


def concentration(pi_H: Tensor) -> Tensor:
    """1 − entropy over the heads / ln H, […]: 0 for uniform memberships, 1 where one head has the whole token.

    Raises:
        ValueError: there is only one head.
    """
    heads = pi_H.shape[-1]
    if heads < 2:
        raise ValueError("the concentration of memberships needs 2 heads or more: 1")
    return 1 - torch.special.entr(pi_H).sum(-1) / math.log(heads)


def by_position(model: TostLM, sequences_NT: Tensor) -> ByPosition:
    """Statistics of Π by position over the sequences."""
    running = _RunningStatistics(model, sequences_NT)
    for tokens_T in sequences_NT:
        running.count += 1
        run_in_tiles(model, tokens_T[None], running.add)
    return running.statistics()


@torch.inference_mode()
def after_context(
    model: TostLM, probes_NT: Tensor, context_S: Tensor, amounts: Sequence[int]
) -> Iterator[AfterContext]:
    """The probes without context and after each of the `amounts` of context tokens.

    Args:
        model: in evaluation mode; it accepts sequences as long as context and probe together.
        probes_NT: N sequences; the last token is only a label.
        context_S: other text, at least as long as the largest amount.
        amounts: numbers of context tokens, positive and increasing.
    """
    state, consumed, reference_NLTH = None, 0, None
    for amount in [0, *amounts]:
        if amount:
            state, consumed = run_in_tiles(model, context_S[None, consumed:amount], lambda _: None, state), amount
        probed = [_probe(model, probe_T, state) for probe_T in probes_NT]
        pi_NLTH = torch.stack([pi_LTH for pi_LTH, _ in probed])
        reference_NLTH = pi_NLTH if reference_NLTH is None else reference_NLTH
        moved_NLT = (pi_NLTH - reference_NLTH).abs().sum(-1) / 2
        moved, concentrated = (x_NLT.mean((0, 2)).tolist() for x_NLT in (moved_NLT, concentration(pi_NLTH)))
        yield AfterContext(amount, moved, concentrated, sum(nats for _, nats in probed) / len(probed))


@contextmanager
def recorded_memberships(model: TostLM) -> Iterator[list[Tensor]]:
    """Record Π [B, T, H] of each call of a TSSA layer until the context ends."""
    recorded: list[Tensor] = []
    with observe_layers(model, lambda tile: recorded.append(tile.pi)):
        yield recorded


class _RunningStatistics:
    """Sums over the sequences so far; squared deviations by Welford's update."""

    def __init__(self, model: TostLM, sequences_NT: Tensor) -> None:
        layers = len(tssa_mixers(model))
        self.sequences, tokens = sequences_NT.shape
        zeros = partial(torch.zeros, dtype=torch.float64, device=sequences_NT.device)
        self.ends = torch.tensor(position_ends(tokens), device=sequences_NT.device)
        self.count = 0
        self.mean_LTH = zeros(layers, tokens, model.config.heads)
        self.squares_LPH = zeros(layers, len(self.ends), model.config.heads)
        self.concentration_LP, self.spread_LP = zeros(layers, len(self.ends)), zeros(layers, len(self.ends))
        self.bin_T = torch.bucketize(torch.arange(tokens, device=sequences_NT.device) + 1, self.ends)

    def add(self, tile: LayerTile) -> None:
        pi_TH, mean_TH = tile.pi[0], self.mean_LTH[tile.layer, tile.positions]
        bin_T = self.bin_T[tile.positions]
        self.concentration_LP[tile.layer].index_add_(0, bin_T, concentration(pi_TH))
        self.spread_LP[tile.layer].index_add_(0, bin_T, tile.scores[0].std(-1, correction=0))
        deviation_TH = pi_TH - mean_TH
        mean_TH += deviation_TH / self.count
        self.squares_LPH[tile.layer].index_add_(0, bin_T, deviation_TH * (pi_TH - mean_TH))

    def statistics(self) -> ByPosition:
        lengths_P = self.ends.diff(prepend=self.ends.new_zeros(1))
        concentration_LP, spread_LP = (
            x_LP / (self.sequences * lengths_P) for x_LP in (self.concentration_LP, self.spread_LP)
        )
        variance_LPH = self.squares_LPH / (lengths_P[:, None] * max(self.sequences - 1, 1))
        bins = [slice(*ends) for ends in pairwise([0, *self.ends.tolist()])]
        layers = range(len(self.mean_LTH))
        return ByPosition(
            concentration_LP.tolist(),
            spread_LP.tolist(),
            [self._explained(layer, slice(None), slice(None)) for layer in layers],
            [[self._explained(layer, p, positions) for p, positions in enumerate(bins)] for layer in layers],
            self.sequences,
            self.mean_LTH,
            variance_LPH.sqrt(),
            self.bin_T,
        )

    def _explained(self, layer: int, bins: int | slice, positions: slice) -> float | None:
        mean_TH, within = self.mean_LTH[layer, positions], float(self.squares_LPH[layer, bins].sum())
        between = self.sequences * float((mean_TH - mean_TH.mean(0)).square().sum())
        return explained_fraction(within, within + between, self.sequences * len(mean_TH), len(mean_TH))


def explained_fraction(within: float, total: float, count: int, groups: int) -> float | None:
    """Fraction of a variance that groups explain: 1 − (variance within groups) / (variance), both unbiased.

    It is about 0 for random groups and 1 where all members of a group are equal.

    Args:
        within: sum of squared deviations from the groups' means.
        total: sum of squared deviations from the mean.
        count: number of members.
        groups: number of groups.

    Returns:
        None where the variance is rounding error or no group has two members.
    """
    if total <= count * MIN_DEVIATION**2 or count <= groups:
        return None
    return 1 - (within / (count - groups)) / (total / (count - 1))


def _probe(model: TostLM, probe_T: Tensor, state: LMState | None) -> tuple[Tensor, float]:
    """Memberships [L, T, H] of the tokens after `state`, and their loss."""
    with recorded_memberships(model) as recorded:
        loss = model(probe_T[None, :-1], labels=probe_T[None, 1:], state=state, output_state=False).loss
    assert loss is not None
    return torch.cat(recorded), loss.item()
