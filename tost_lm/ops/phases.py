"""The interface of a backend in phases: the kernels of causal TSSA between the points where ranks communicate.

Phases exchange sums over tokens only. A carry (from an initial state or another rank) is added to these sums, and the
softmax over heads includes heads on other ranks. Both happen outside the kernels.

    forward    energy ─ carry S1 → memberships ─ carry S2, N → output
    backward   output_backward ─ carry R2, RN → memberships_backward ─ carry R1 → energy_backward

Shapes: M = B·T tokens of a flat sequence, H heads, D channels a head, N documents, K chunks (`Layout`). Statistics,
scores and memberships are float32, or float64 for float64 inputs.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tost_lm.ops.layout import Layout
from tost_lm.ops.naive import Membership


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
    """The parameters of the scores z = temp · (scale_t · Σ_d w²/S1 + bias_scale · bias)."""

    membership: Membership
    temp_H: Tensor
    bias_BHT: Tensor | None
    """Any strides, so an expanded view needs no copy. Token m of the flat sequence is [m // T, :, m % T]."""
    count_N: Tensor
    """Tokens of each document before these, int64; used by `energy-mean`."""

    def bias_scale(self, channels: int) -> int:
        """The factor of the bias: it is inside the published sum over channels, but outside the mean over them."""
        return 1 if self.membership == "energy-mean" else channels


class HeadSoftmax(Protocol):
    """The softmax over heads, of one rank or several."""

    def forward(self, z_MH: Tensor) -> Tensor:
        """Scores → memberships."""
        ...

    def backward(self, pi_MH: Tensor, d_pi_MH: Tensor) -> Tensor:
        """Memberships and their gradient → gradient of the scores, Π·(dΠ − Σ_h Π·dΠ).

        The result does not change when a number is subtracted from dΠ of all heads. Subtract dΠ of the largest Π:
        where Π is nearly 1, as at a document's first token, the two terms are else equal, and float32 cancels.
        """
        ...


class LocalSoftmax:
    """The softmax over heads of one rank."""

    def forward(self, z_MH: Tensor) -> Tensor:
        return z_MH.softmax(-1)

    def backward(self, pi_MH: Tensor, d_pi_MH: Tensor) -> Tensor:
        d_pi_MH = d_pi_MH - d_pi_MH.gather(-1, pi_MH.argmax(-1, keepdim=True))
        return pi_MH * (d_pi_MH - (pi_MH * d_pi_MH).sum(-1, keepdim=True))


@dataclass(frozen=True)
class HeadsOfRows:
    """The softmax over the heads of each of several rows side by side, [M, rows · heads]."""

    heads: int
    """Of one row."""
    softmax: HeadSoftmax
    """Over the heads of one row."""

    def forward(self, z_MH: Tensor) -> Tensor:
        return self.softmax.forward(z_MH.view(-1, self.heads)).view(z_MH.shape)

    def backward(self, pi_MH: Tensor, d_pi_MH: Tensor) -> Tensor:
        of_rows = (x.reshape(-1, self.heads) for x in (pi_MH, d_pi_MH))
        return self.softmax.backward(*of_rows).view(pi_MH.shape)


@dataclass(frozen=True)
class UniformMemberships:
    """The ablation Π = 1/H for any scores."""

    heads: int
    """Heads of all ranks."""

    def forward(self, z_MH: Tensor) -> Tensor:
        return torch.full_like(z_MH, 1 / self.heads)

    def backward(self, pi_MH: Tensor, d_pi_MH: Tensor) -> Tensor:
        return torch.zeros_like(d_pi_MH)


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
