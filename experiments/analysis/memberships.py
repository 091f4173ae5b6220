"""Memberships Π of a trained model: their concentration by position, and their change after more context.

Shapes: N sequences, T tokens, L TSSA layers, H heads, P position bins.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.analysis.charts import layers_chart
from experiments.analysis.layers import Analysis, LayerTile, observe_layers, run_in_tiles, tssa_mixers
from tost_lm.markdown import table
from tost_lm.model import LMState, ModelConfig, TostLM
from tost_lm.ops.positions import position_ends
from tost_lm.page import Chart, Page

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


def fitting_contexts(model: ModelConfig, contexts: Sequence[int], probe_tokens: int) -> list[int]:
    """Those of the increasing numbers of context tokens that fit into the model's positions together with a probe."""
    limit = model.position_limit
    return [n for n in contexts if limit is None or n + _probe_tokens(model, probe_tokens) <= limit]


def measure(of: Analysis, probe_tokens: int, contexts: Sequence[int]) -> dict[str, Any]:
    """Memberships by position, and those of the first `probe_tokens` after each number of context tokens."""
    model, found = of.model.config, by_position(of.model, of.sequences)
    amounts, probe_tokens = fitting_contexts(model, contexts, probe_tokens), _probe_tokens(model, probe_tokens)
    after = after_context(of.model, of.sequences[:, : probe_tokens + 1], of.text.context_S, amounts)
    return {
        "sequences": len(of.sequences),
        "probe_tokens": probe_tokens,
        "position_ends": position_ends(model.context_length),
        "concentration_by_position": found.concentration,
        "score_spread_by_position": found.spread,
        "explained_by_position": found.explained,
        "explained_within_stretches": found.explained_within,
        "after_context": [asdict(row) for row in after],
        "left_out_contexts": list(contexts[len(amounts) :]),
        "limit": model.position_limit,
    }


def _probe_tokens(model: ModelConfig, wanted: int) -> int:
    return min(wanted, model.context_length - 1)  # the last token of a sequence is only a label


def section(results: dict[str, Any], page: Page) -> list[str]:
    """Memberships of each TSSA layer by position and after more context."""
    by_position = zip(*results["concentration_by_position"], strict=True)
    layers = [f"TSSA layer {number}" for number in range(1, 1 + len(results["concentration_by_position"]))]
    rows = [
        (f"{row['context_tokens']:,}", f"{row['nats_per_token']:.4f}", *_three_digits(row["moved"]))
        for row in results["after_context"]
    ]
    skipped = ", ".join(f"{tokens:,}" for tokens in results["left_out_contexts"])
    return [
        "## Memberships",
        page.add_figure("memberships", position_chart(results), "Concentration, spread, and explained variance"),
        "Concentration of the memberships by position: 1 − entropy over the heads / ln(heads), 0 for uniform "
        "memberships and 1 where one head has the whole token. The spread is the standard deviation of a token's "
        "scores over the heads; memberships are the softmax of the scores. On the right, the fraction of the variance "
        f"within a position bin that the position explains. Over all positions it explains {_percentages(results)} (by "
        "layer).",
        table(
            ("positions up to", *layers),
            [
                (f"{end:,}", *_three_digits(values))
                for end, values in zip(results["position_ends"], by_position, strict=True)
            ],
        ),
        f"The first {results['probe_tokens']} tokens of {results['sequences']} sequences after context tokens of other "
        "text: loss in nats per token, and change of the memberships (total variation distance) by layer.",
        table(("context tokens", "loss", *layers), rows),
        f"Skipped contexts: {skipped}; the model has {results['limit']:,} positions." if skipped else "",
    ]


def position_chart(results: Mapping[str, Any]) -> Chart:
    """Concentration, spread, and variance explained by position."""
    panels = {
        "concentration": results["concentration_by_position"],
        "score spread (nats)": results["score_spread_by_position"],
        "explained variance": results["explained_within_stretches"],
    }
    return layers_chart("position (tokens, end of the bin)", results["position_ends"], panels)


def _percentages(results: Mapping[str, Any]) -> str:
    return ", ".join("–" if value is None else f"{value:.1%}" for value in results["explained_by_position"])


def _three_digits(values: Sequence[float]) -> list[str]:
    return [f"{value:.3f}" for value in values]
