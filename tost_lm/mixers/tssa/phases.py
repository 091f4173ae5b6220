"""Causal TSSA in phases: the kernels of a backend between the points where ranks communicate, and the two passes that
are built from them, with sums over the tokens of other ranks in between.

Phases exchange sums over tokens only. A carry (from an initial state or another rank) is added to these sums, and the
softmax over heads includes heads on other ranks. Both happen outside the kernels.

    forward    energy ─ carry S1 → memberships ─ carry S2, N → output
    backward   output_backward ─ carry R2, RN → memberships_backward ─ carry R1 → energy_backward

There are two exchanges forward and two backward, each no longer than a document's statistics. The next phase needs the
whole result, so an exchange starts as soon as a phase has its sums. The sums stored for the backward include the
received ones, so the backward repeats no exchange.

Shapes: M = B·T tokens of a flat sequence, H heads, D channels a head, N documents, K chunks (`Layout`). Statistics,
scores and memberships are float32, or float64 for float64 inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tost_lm.mixers.layer import HeadSoftmax
from tost_lm.ops.exchange import Sum, exclusive_scan
from tost_lm.ops.layout import Layout, LocalDocuments, SequenceShard


class Sums(NamedTuple):
    """Sums over the tokens of this call: before (backward: after) each chunk of a document, and over each document."""

    chunk: Tensor
    """The exclusive prefix sum over the document's earlier chunks (backward: the exclusive suffix sum over its later
    chunks), [K, H, D] or [K, H]."""
    document: Tensor
    """[N, H, D] or [N, H]."""

    def with_carry(self, carry_N: Tensor | None, layout: Layout) -> Tensor:
        """`chunk` plus the carry of each chunk's document, [K, …]; None: 0."""
        if carry_N is None:
            return self.chunk
        return self.chunk + (carry_N if layout.documents == 1 else carry_N[layout.document_K])


class Statistics(NamedTuple):
    """S1, S2 and N, or their gradients R1, R2 and RN: [·, H, D], [·, H, D] and [·, H]."""

    energy: Tensor
    weighted: Tensor
    mass: Tensor


class Scoring(NamedTuple):
    """The parameters of the scores z = temp · Σ_d (w²/S1 + bias)."""

    temp_H: Tensor
    bias_BHT: Tensor | None
    """Any strides, so an expanded view needs no copy. Token m of the flat sequence is [m // T, :, m % T]."""


class LocalSoftmax:
    """The softmax over heads of one rank."""

    def forward(self, z_MH: Tensor) -> Tensor:
        return z_MH.softmax(-1)

    def backward(self, pi_MH: Tensor, d_pi_MH: Tensor) -> Tensor:
        d_pi_MH = d_pi_MH - d_pi_MH.gather(-1, pi_MH.argmax(-1, keepdim=True))
        return pi_MH * (d_pi_MH - (pi_MH * d_pi_MH).sum(-1, keepdim=True))


class Phases(Protocol):
    """A module with these functions. `softmax` None: the softmax over the heads of this rank, in the same pass."""

    def chunk_tokens(self, heads: int, channels: int, device: torch.device) -> int:
        """Tokens in each chunk of the layout."""
        ...

    def energy(self, w_MHD: Tensor, layout: Layout) -> Sums:
        """(a) Σ w²."""
        ...

    def memberships(
        self,
        w_MHD: Tensor,
        layout: Layout,
        scoring: Scoring,
        energy_KHD: Tensor,
        softmax: HeadSoftmax | None = None,
    ) -> tuple[Tensor, Sums, Sums]:
        """(b) Π [M, H], Σ Π·w² and Σ Π, given S1 before each chunk."""
        ...

    def output(self, w_MHD: Tensor, layout: Layout, pi_MH: Tensor, weighted_KHD: Tensor, mass_KH: Tensor) -> Tensor:
        """(c) y [M, H, D] in w's dtype, given S2 and N before each chunk."""
        ...

    def output_backward(
        self, dy_MHD: Tensor, w_MHD: Tensor, layout: Layout, pi_MH: Tensor, weighted_KHD: Tensor, mass_KH: Tensor
    ) -> tuple[Sums, Sums]:
        """(c′) The gradients of S2 and N: Σ gD/N′ and Σ −Σ_d gD·D/N′."""
        ...

    def memberships_backward(
        self,
        dy_MHD: Tensor,
        w_MHD: Tensor,
        layout: Layout,
        scoring: Scoring,
        pi_MH: Tensor,
        energy_KHD: Tensor,
        weighted_KHD: Tensor,
        mass_KH: Tensor,
        d_weighted_KHD: Tensor,
        d_mass_KH: Tensor,
        softmax: HeadSoftmax | None = None,
    ) -> tuple[Tensor, Tensor, Sums]:
        """(b′) The gradients of z [M, H] and of temp [H], and of S1: Σ −u·w²/S1², given R2 and RN after each chunk."""
        ...

    def energy_backward(
        self,
        dy_MHD: Tensor,
        w_MHD: Tensor,
        layout: Layout,
        scoring: Scoring,
        pi_MH: Tensor,
        d_z_MH: Tensor,
        energy_KHD: Tensor,
        weighted_KHD: Tensor,
        mass_KH: Tensor,
        d_energy_KHD: Tensor,
        d_weighted_KHD: Tensor,
    ) -> Tensor:
        """(a′) dw [M, H, D] in w's dtype, given R1 and R2 after each chunk."""
        ...


@dataclass(frozen=True)
class PhasedBackend:
    """The forward and the backward pass of the operator, from the `Phases` of a backend."""

    phases: Phases
    local: LocalDocuments
    shard: SequenceShard | None
    """None: all tokens are here."""

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
