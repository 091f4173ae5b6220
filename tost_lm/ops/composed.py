"""The two passes of causal TSSA composed of a backend's phases, with the sums over tokens of other ranks in between.

Two exchanges forward and two backward, none of them longer than a document's statistics. The next phase needs each of
them whole, so they start as soon as a phase has its sums. What they bring is in the sums that are kept for the
backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tost_lm.ops.layout import Layout
from tost_lm.ops.phases import HeadSoftmax, Phases, Scoring, SequenceShard, Statistics
from tost_lm.ops.split import Pieces


@dataclass(frozen=True)
class Composed:
    phases: Phases
    pieces: Pieces
    shard: SequenceShard | None
    """None: all tokens are here."""
    rows: bool
    """Whether every document's sums are wanted, as `SequenceShard.join` has it."""

    def chunk_tokens(self, heads: int, channels: int, device: torch.device) -> int:
        return self.phases.chunk_tokens(heads, channels, device)

    def forward(
        self, w_MHD: Tensor, layout: Layout, scoring: Scoring, initial: Statistics, softmax: HeadSoftmax | None
    ) -> tuple[Tensor, Tensor, Statistics, Statistics]:
        energy = self.phases.energy(w_MHD, layout)
        [energy_n], [final_energy] = self._join([initial.energy], [energy.document], later=False)
        energy_KHD = energy.carried(energy_n, layout)
        pi_MH, weighted, mass = self.phases.memberships(w_MHD, layout, scoring, energy_KHD, softmax)
        [weighted_n, mass_n], finals = self._join(initial[1:], [weighted.document, mass.document], later=False)
        weighted_KHD, mass_KH = weighted.carried(weighted_n, layout), mass.carried(mass_n, layout)
        y_MHD = self.phases.output(w_MHD, layout, pi_MH, weighted_KHD, mass_KH)
        return y_MHD, pi_MH, Statistics(energy_KHD, weighted_KHD, mass_KH), Statistics(final_energy, *finals)

    def backward(
        self,
        dy_MHD: Tensor,
        w_MHD: Tensor,
        layout: Layout,
        scoring: Scoring,
        pi_MH: Tensor,
        before: Statistics,
        d_final: Statistics,
        softmax: HeadSoftmax | None,
    ) -> tuple[Tensor, Tensor, Tensor, Statistics]:
        d_weighted, d_mass = self.phases.output_backward(dy_MHD, w_MHD, layout, pi_MH, before.weighted, before.mass)
        [d_weighted_n, d_mass_n], d_initials = self._join(
            d_final[1:], [d_weighted.document, d_mass.document], later=True
        )
        d_weighted_KHD, d_mass_KH = d_weighted.carried(d_weighted_n, layout), d_mass.carried(d_mass_n, layout)
        d_z_MH, d_temp_H, d_energy = self.phases.memberships_backward(
            dy_MHD, w_MHD, layout, scoring, pi_MH, *before, d_weighted_KHD, d_mass_KH, softmax
        )
        [d_energy_n], [d_initial_energy] = self._join([d_final.energy], [d_energy.document], later=True)
        d_energy_KHD = d_energy.carried(d_energy_n, layout)
        dw_MHD = self.phases.energy_backward(
            dy_MHD, w_MHD, layout, scoring, pi_MH, d_z_MH, *before, d_energy_KHD, d_weighted_KHD
        )
        return dw_MHD, d_z_MH, d_temp_H, Statistics(d_initial_energy, *d_initials)

    def _join(
        self, outside_N: Sequence[Tensor], here_n: Sequence[Tensor], *, later: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        if self.shard is not None:
            return self.shard.join(self.pieces, outside_N, here_n, later=later, rows=self.rows)
        return [*outside_N], [x + here.to(x.dtype) for x, here in zip(outside_N, here_n, strict=True)]
