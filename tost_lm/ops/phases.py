"""The phases every fast backend offers, and causal TSSA composed of them.

Between phases only sums over tokens pass: that is where a carry from elsewhere (an initial state, another rank)
comes in, and the softmax over heads is where heads on other ranks do. Both enter here; no kernel knows of them.

    forward    energy ─ carry S1 → memberships ─ carry S2, N → output
    backward   output_backward ─ carry R2, RN → memberships_backward ─ carry R1 → energy_backward

Shapes: M = B·T tokens of a flat sequence, H heads, D channels a head, N documents, K chunks (`Layout`). Statistics,
scores and memberships are float32, or float64 for float64 inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tost_lm.ops.layout import Layout
from tost_lm.ops.naive import Membership
from tost_lm.ops.split import Pieces, SequenceSplit


class Sums(NamedTuple):
    """Sums over the tokens of each document, as far as each chunk.

    In the forward direction `chunk` is the sum over the document's earlier chunks (an exclusive prefix), in the
    backward direction over its later chunks (an exclusive suffix). Neither holds anything from outside this call.
    """

    chunk: Tensor
    """[K, H, D] or [K, H]."""
    document: Tensor
    """The sum over each whole document, [N, H, D] or [N, H]."""

    def carried(self, carry_N: Tensor, layout: Layout) -> Tensor:
        """The chunks' sums with what each document brings along, [K, …]."""
        return self.chunk + (carry_N if layout.documents == 1 else carry_N[layout.document_K])


class Statistics(NamedTuple):
    """S1, S2 and N, or the gradients R1, R2 and RN of them: [·, H, D], [·, H, D] and [·, H]."""

    energy: Tensor
    weighted: Tensor
    mass: Tensor


class Scoring(NamedTuple):
    """How scores come about: z = temp · (scale_t · Σ_d w²/S1 + bias_scale · bias)."""

    membership: Membership
    temp_H: Tensor
    bias_BHT: Tensor | None
    """Any strides (an expanded view is fine); token m of the flat sequence is [m // T, :, m % T]."""
    count_N: Tensor
    """Tokens of each document before these, int64; `energy-mean` needs it."""

    def bias_scale(self, channels: int) -> int:
        """How often the bias counts: it sits inside the published sum over channels, beside a mean it counts once."""
        return 1 if self.membership == "energy-mean" else channels


class HeadSoftmax(Protocol):
    """The softmax over heads, where the heads on this rank are not all."""

    def forward(self, z_MH: Tensor) -> Tensor:
        """Scores → memberships."""
        ...

    def backward(self, pi_MH: Tensor, d_pi_MH: Tensor) -> Tensor:
        """Memberships and their gradient → gradient of the scores, Π·(dΠ − Σ_h Π·dΠ).

        dΠ counts only up to what is subtracted from all heads. Subtract that of the largest Π first: where it is nearly
        1, as at a document's first token, the two terms are the same number otherwise, and float32 loses the rest.
        """
        ...


class LocalSoftmax:
    """All heads are here."""

    def forward(self, z_MH: Tensor) -> Tensor:
        return z_MH.softmax(-1)

    def backward(self, pi_MH: Tensor, d_pi_MH: Tensor) -> Tensor:
        d_pi_MH = d_pi_MH - d_pi_MH.gather(-1, pi_MH.argmax(-1, keepdim=True))
        return pi_MH * (d_pi_MH - (pi_MH * d_pi_MH).sum(-1, keepdim=True))


class SequenceShard(Protocol):
    """The tokens of this call among those of whole sequences that lie on other ranks too."""

    @property
    def split(self) -> SequenceSplit: ...

    def join(
        self, pieces: Pieces, outside_N: Sequence[Tensor], here_n: Sequence[Tensor], *, later: bool, rows: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Sums over other ranks' tokens, in one exchange.

        Args:
            pieces: the documents here.
            outside_N: what comes before the sequence (with `later`: after it), a row for each of its N documents.
            here_n: sums over the tokens here, a row for each of the n documents here.
            later: the sums run from the end.
            rows: every document's sum is wanted everywhere; else only what documents across ranks need is sent, and
                `outside_N` is 0.

        Returns:
            For each of the n documents what comes before (after) its tokens here, and for each of the N `outside_N`
            with the sum over all its tokens (without `rows`: `outside_N` as it is).
        """
        ...

    def gather(self, x_BHTD: Tensor) -> Tensor:
        """All tokens of the sequence, [B, H, T, D] of every rank in their order, differentiable."""
        ...


@dataclass(frozen=True)
class HeadsOfRows:
    """The softmax over the heads of each of several rows that stand side by side, [M, rows · heads]."""

    heads: int
    softmax: HeadSoftmax
    """Of one row."""

    def forward(self, z_MH: Tensor) -> Tensor:
        return self.softmax.forward(z_MH.view(-1, self.heads)).view(z_MH.shape)

    def backward(self, pi_MH: Tensor, d_pi_MH: Tensor) -> Tensor:
        of_rows = (x.reshape(-1, self.heads) for x in (pi_MH, d_pi_MH))
        return self.softmax.backward(*of_rows).view(pi_MH.shape)


@dataclass(frozen=True)
class UniformMemberships:
    """The ablation Π = 1/H, whatever the scores."""

    heads: int
    """All there are, those elsewhere included."""

    def forward(self, z_MH: Tensor) -> Tensor:
        return torch.full_like(z_MH, 1 / self.heads)

    def backward(self, pi_MH: Tensor, d_pi_MH: Tensor) -> Tensor:
        return torch.zeros_like(d_pi_MH)


class Phases(Protocol):
    """One backend: a module with these functions. `softmax` None: all heads are here, computed in the same pass."""

    def chunk_tokens(self, heads: int, channels: int, device: torch.device) -> int:
        """How long the layout's chunks must be."""
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
