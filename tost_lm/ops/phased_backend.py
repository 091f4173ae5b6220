"""The two passes of causal TSSA built from a backend's phases, with sums over the tokens of other ranks in between.

There are two exchanges forward and two backward, each no longer than a document's statistics. The next phase needs the
whole result, so an exchange starts as soon as a phase has its sums. The sums stored for the backward include the
received ones, so the backward repeats no exchange.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tost_lm.ops.exchange import Sum, exclusive_scan
from tost_lm.ops.layout import Layout
from tost_lm.ops.phases import HeadSoftmax, Phases, Scoring, Statistics
from tost_lm.ops.sequence_shard import LocalDocuments, SequenceShard


@dataclass(frozen=True)
class PhasedBackend:
    """The `Passes` of a backend's `Phases`."""

    phases: Phases
    local: LocalDocuments
    shard: SequenceShard | None
    """None: all tokens are here."""

    def chunk_tokens(self, heads: int, channels: int, device: torch.device) -> int:
        return self.phases.chunk_tokens(heads, channels, device)

    def forward(
        self, w_MHD: Tensor, layout: Layout, scoring: Scoring, initial: Statistics | None, softmax: HeadSoftmax | None
    ) -> tuple[Tensor, Tensor, Statistics, Statistics | None]:
        energy = self.phases.energy(w_MHD, layout)
        [energy_n], final_energy = self._exclusive_scan(initial and initial[:1], [energy.document], reverse=False)
        energy_KHD = energy.with_carry(energy_n, layout)
        pi_MH, weighted, mass = self.phases.memberships(w_MHD, layout, scoring, energy_KHD, softmax)
        [weighted_n, mass_n], finals = self._exclusive_scan(
            initial and initial[1:], [weighted.document, mass.document], reverse=False
        )
        weighted_KHD, mass_KH = weighted.with_carry(weighted_n, layout), mass.with_carry(mass_n, layout)
        y_MHD = self.phases.output(w_MHD, layout, pi_MH, weighted_KHD, mass_KH)
        before = Statistics(energy_KHD, weighted_KHD, mass_KH)
        return y_MHD, pi_MH, before, Statistics(*final_energy, *finals) if initial else None

    def backward(
        self,
        dy_MHD: Tensor,
        w_MHD: Tensor,
        layout: Layout,
        scoring: Scoring,
        pi_MH: Tensor,
        before: Statistics,
        d_final: Statistics | None,
        softmax: HeadSoftmax | None,
    ) -> tuple[Tensor, Tensor, Tensor, Statistics | None]:
        d_weighted, d_mass = self.phases.output_backward(dy_MHD, w_MHD, layout, pi_MH, before.weighted, before.mass)
        [d_weighted_n, d_mass_n], d_initials = self._exclusive_scan(
            d_final and d_final[1:], [d_weighted.document, d_mass.document], reverse=True
        )
        d_weighted_KHD, d_mass_KH = d_weighted.with_carry(d_weighted_n, layout), d_mass.with_carry(d_mass_n, layout)
        d_z_MH, d_temp_H, d_energy = self.phases.memberships_backward(
            dy_MHD, w_MHD, layout, scoring, pi_MH, *before, d_weighted_KHD, d_mass_KH, softmax
        )
        [d_energy_n], d_energy_N = self._exclusive_scan(d_final and d_final[:1], [d_energy.document], reverse=True)
        d_energy_KHD = d_energy.with_carry(d_energy_n, layout)
        dw_MHD = self.phases.energy_backward(
            dy_MHD, w_MHD, layout, scoring, pi_MH, d_z_MH, *before, d_energy_KHD, d_weighted_KHD
        )
        return dw_MHD, d_z_MH, d_temp_H, Statistics(*d_energy_N, *d_initials) if d_final else None

    def _exclusive_scan(
        self, outside_N: Sequence[Tensor] | None, here_n: Sequence[Tensor], *, reverse: bool
    ) -> tuple[Sequence[Tensor | None], Sequence[Tensor]]:
        """The sums before (with `reverse`: after) each document's tokens here, and over the whole documents, given
        those outside the sequence and those over the tokens here. Without `outside_N`, which is then 0, the sums over
        whole documents are left out, and None stands for 0."""
        if self.shard is None:
            if outside_N is None:
                return [None] * len(here_n), []
            return outside_N, [x + here.to(x.dtype) for x, here in zip(outside_N, here_n, strict=True)]
        joined_nC = torch.cat([here.flatten(1) for here in here_n], 1)
        sum_nC, total_NC = exclusive_scan(
            self.shard, self.local, Sum(), joined_nC, reverse=reverse, per_document=outside_N is not None
        )
        sizes = [here[0].numel() for here in here_n]
        sums = [x.reshape_as(here) for x, here in zip(sum_nC.split(sizes, 1), here_n, strict=True)]
        if outside_N is None or total_NC is None:
            return sums, []
        totals = [outside + x.view_as(outside) for outside, x in zip(outside_N, total_NC.split(sizes, 1), strict=True)]
        return [x[self.local.documents] + here for x, here in zip(outside_N, sums, strict=True)], totals
