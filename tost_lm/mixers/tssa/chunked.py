"""The phases of causal TSSA in PyTorch, chunk by chunk, for any device and dtype. A chunk fits the cache of a CPU.

Interface and shapes as in `phases`; t tokens of a chunk.

Source: arXiv 2412.17810, released causal form; the backward is derived from it. With a = 1/(1 + S2/N′), N′ = N + 1e-8
and u = temp·dz:

    q  = dy·w·Π·a²/N′           R2 = Σ_{s≥t} q       RN = Σ_{s≥t} −Σ_d q·S2/N′
    dΠ = −Σ_d dy·w·a + Σ_d R2·w² + RN                dz = Π·(dΠ − Σ_h Π·dΠ)
    r  = −u·w²/S1²              R1 = Σ_{s>t} r
    dw = −dy·Π·a + 2w·(Π·R2 + u·(S1 − w²)/S1² + R1)

The token's own term of S1's gradient is combined with that of w²/S1, because the two cancel at a document's first
token; so R1 sums later tokens only. Where S1 is below its floor, the floor replaces it and has no gradient.
"""

import dataclasses
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tost_lm.mixers.layer import HeadSoftmax
from tost_lm.mixers.tssa.phases import LocalSoftmax, Scoring, Sums
from tost_lm.mixers.tssa.statistics import ENERGY_FLOOR
from tost_lm.ops.layout import Layout
from tost_lm.ops.precision import MASS_FLOOR, running_dtype, statistics_dtype
from tost_lm.sizes import CPU_CHUNK_ELEMENTS, DEVICE_CHUNK_ELEMENTS


class Scratch:
    """Tensors of one chunk's size that all chunks reuse: allocating new memory costs more time than the arithmetic."""

    def __init__(self, w_MHD: Tensor, layout: Layout):
        longest = min(layout.chunk_tokens, len(w_MHD))
        self._allocate = lambda: w_MHD.new_empty(longest, *w_MHD.shape[1:], dtype=statistics_dtype(w_MHD))
        self._tensors: list[Tensor] = []
        self._used = 0

    def reset(self) -> None:
        """Start a new chunk: all tensors are free again."""
        self._used = 0

    def empty(self, tokens: int) -> Tensor:
        """An uninitialised tensor [t, H, D]."""
        if self._used == len(self._tensors):
            self._tensors.append(self._allocate())
        self._used += 1
        return self._tensors[self._used - 1][:tokens]


class Chunk:
    """Tokens `tokens` of a document."""

    def __init__(self, index: int, start: int, end: int, scratch: Scratch):
        self.index, self.tokens = index, slice(start, end)
        self._length = end - start
        self._scratch = scratch

    def new(self) -> Tensor:
        """An uninitialised tensor [t, H, D] in the statistics dtype, valid until the next chunk."""
        return self._scratch.empty(self._length)

    def read(self, x_MHD: Tensor) -> Tensor:
        """The chunk's tokens in the statistics dtype; do not modify them."""
        x = x_MHD[self.tokens]
        return x if x.dtype == statistics_dtype(x) else self.new().copy_(x)

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        """x · y in scratch memory."""
        return torch.mul(x, y, out=self.new())

    def score_bias(self, scoring: Scoring, channels: int) -> Tensor | float:
        """The bias in the score, [t, H] or 0."""
        if scoring.bias_BHT is None:
            return 0.0
        b, t = divmod(self.tokens.start, scoring.bias_BHT.shape[-1])
        return channels * scoring.bias_BHT[b, :, t : t + self._length].T


def chunks(w_MHD: Tensor, layout: Layout) -> Iterator[Chunk]:
    """All chunks. The next chunk reuses the scratch memory of this one."""
    scratch = Scratch(w_MHD, layout)
    for index, (start, end) in enumerate(zip(layout.start_K.tolist(), layout.end_K.tolist(), strict=True)):
        scratch.reset()
        yield Chunk(index, start, end, scratch)


def chunk_tokens(heads: int, channels: int, device: torch.device) -> int:
    """Tokens of a chunk. At least 32: the sums stored for each chunk then take at most about 1/16 of the memory of a
    float32 w (more if documents are shorter)."""
    elements = CPU_CHUNK_ELEMENTS if device.type == "cpu" else DEVICE_CHUNK_ELEMENTS
    return max(32, elements // (heads * channels) // SCAN_ROWS * SCAN_ROWS)


def energy(w_MHD: Tensor, layout: Layout) -> Sums:
    """(a) Σ w²."""
    sums_KHD = _rows(w_MHD, layout)
    for chunk in chunks(w_MHD, layout):
        w = chunk.read(w_MHD)
        sums_KHD[chunk.index] = chunk.product(w, w).sum(0)
    return _over_earlier_chunks(sums_KHD, layout)


def memberships(
    w_MHD: Tensor, layout: Layout, scoring: Scoring, energy_KHD: Tensor, softmax: HeadSoftmax | None = None
) -> tuple[Tensor, Sums, Sums]:
    """(b) Π, Σ Π·w² and Σ Π."""
    z_MH = w_MHD.new_empty(w_MHD.shape[:2], dtype=statistics_dtype(w_MHD))
    for chunk in chunks(w_MHD, layout):
        w = chunk.read(w_MHD)
        w_sq, energy_t = chunk.product(w, w), chunk.product(w, w)
        running_sum_(energy_t, energy_KHD[chunk.index])
        z_MH[chunk.tokens] = scoring.temp_H * scores(chunk, energy_shares(w_sq, energy_t), scoring, w.shape[-1])
    pi_MH = (softmax or LocalSoftmax()).forward(z_MH)
    weighted_KHD = _rows(w_MHD, layout)
    mass_KH = torch.empty_like(weighted_KHD[..., 0])
    for chunk in chunks(w_MHD, layout):
        w, pi = chunk.read(w_MHD), pi_MH[chunk.tokens]
        weighted_KHD[chunk.index] = chunk.product(w, w).mul_(pi[..., None]).sum(0)
        mass_KH[chunk.index] = pi.sum(0)
    return pi_MH, _over_earlier_chunks(weighted_KHD, layout), _over_earlier_chunks(mass_KH, layout)


def output(w_MHD: Tensor, layout: Layout, pi_MH: Tensor, weighted_KHD: Tensor, mass_KH: Tensor) -> Tensor:
    """(c) y."""
    y_MHD = torch.empty_like(w_MHD)
    for chunk in chunks(w_MHD, layout):
        w, pi = chunk.read(w_MHD), pi_MH[chunk.tokens]
        weighted = chunk.product(w, w).mul_(pi[..., None])
        running_sum_(weighted, weighted_KHD[chunk.index])
        mass = pi.cumsum(0) + mass_KH[chunk.index]
        y_MHD[chunk.tokens] = output_of(w, pi, weighted, mass, out=chunk.new())
    return y_MHD


def output_backward(
    dy_MHD: Tensor, w_MHD: Tensor, layout: Layout, pi_MH: Tensor, weighted_KHD: Tensor, mass_KH: Tensor
) -> tuple[Sums, Sums]:
    """(c′) The gradients of S2 and N."""
    d_weighted_KHD = _rows(w_MHD, layout)
    d_mass_KH = torch.empty_like(d_weighted_KHD[..., 0])
    for chunk in chunks(w_MHD, layout):
        out = _output_gradients(chunk, dy_MHD, w_MHD, pi_MH, weighted_KHD, mass_KH)
        d_weighted_KHD[chunk.index] = out.d_weighted.sum(0)
        d_mass_KH[chunk.index] = out.d_mass.sum(0)
    return _over_later_chunks(d_weighted_KHD, layout), _over_later_chunks(d_mass_KH, layout)


def memberships_backward(
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
    """(b′) The gradients of z, of temp and of S1."""
    d_pi_MH = torch.empty_like(pi_MH)
    for chunk in chunks(w_MHD, layout):
        out = _output_gradients(chunk, dy_MHD, w_MHD, pi_MH, weighted_KHD, mass_KH)
        running_sum_(out.d_weighted, d_weighted_KHD[chunk.index], newest_first=True)
        d_mass = suffix(out.d_mass, d_mass_KH[chunk.index])
        d_pi_MH[chunk.tokens] = membership_gradient(chunk, out, d_mass)
    d_z_MH = (softmax or LocalSoftmax()).backward(pi_MH, d_pi_MH)
    d_energy_KHD = _rows(w_MHD, layout)
    d_temp_H = torch.zeros_like(scoring.temp_H)
    for chunk in chunks(w_MHD, layout):
        w = chunk.read(w_MHD)
        w_sq = chunk.product(w, w)
        score = score_gradients(chunk, d_z_MH[chunk.tokens], w_sq, energy_KHD[chunk.index], scoring)
        d_energy_KHD[chunk.index] = score.d_energy.sum(0)
        d_temp_H += score.d_temp
    return d_z_MH, d_temp_H, _over_later_chunks(d_energy_KHD, layout)


def energy_backward(
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
    """(a′) dw."""
    dw_MHD = torch.empty_like(w_MHD)
    for chunk in chunks(w_MHD, layout):
        k = chunk.index
        out = _output_gradients(chunk, dy_MHD, w_MHD, pi_MH, weighted_KHD, mass_KH)
        running_sum_(out.d_weighted, d_weighted_KHD[k], newest_first=True)
        score = score_gradients(chunk, d_z_MH[chunk.tokens], out.w_sq, energy_KHD[k], scoring)
        running_sum_(score.d_energy, d_energy_KHD[k], newest_first=True)
        dw_MHD[chunk.tokens] = token_gradient(chunk.read(w_MHD), pi_MH[chunk.tokens], out, score, d_energy_KHD[k])
    return dw_MHD


# --- Functions of one chunk: [t, H, D] and [t, H]. Tensors of w's size are in the chunk's scratch memory.


SCAN_ROWS = 16


def running_sum_(x: Tensor, carry: Tensor, newest_first: bool = False) -> None:
    """In place: sums over time up to and including each token, or from each token on, on top of `carry`.

    Args:
        x: [t, H, D].
        carry: [H, D], the sum over the tokens before, or after.
        newest_first: sum from each token on.
    """
    if not x.is_cpu:
        sums = x.flip(0).cumsum(0).flip(0) if newest_first else x.cumsum(0)
        x.copy_(sums.add_(carry))
        return
    # On a CPU torch.cumsum over the first dimension adds one scalar at a time. Adding whole rows takes a fifth of its
    # time: first within all groups of 16 rows at once, then over the groups, then the sums of earlier groups to each.
    groups = len(x) // SCAN_ROWS
    if groups < 2:
        for earlier, row in pairwise(x.unbind(0)[:: -1 if newest_first else 1]):
            row.add_(earlier)
        x.add_(carry)
        return
    grouped, rest = x[: groups * SCAN_ROWS].unflatten(0, (groups, SCAN_ROWS)), x[groups * SCAN_ROWS :]
    if newest_first and len(rest):
        running_sum_(rest, carry, newest_first)
        carry = rest[0]
    steps = grouped.unbind(1)[:: -1 if newest_first else 1]
    for earlier, row in pairwise(steps):
        row.add_(earlier)
    sums_of_groups = steps[-1].clone()
    running_sum_(sums_of_groups, carry, newest_first)
    first, later, sums = (
        (-1, grouped[:-1], sums_of_groups[1:]) if newest_first else (0, grouped[1:], sums_of_groups[:-1])
    )
    grouped[first].add_(carry)
    later.add_(sums[:, None])
    if len(rest) and not newest_first:
        running_sum_(rest, sums_of_groups[-1])


def suffix(x: Tensor, after: Tensor) -> Tensor:
    """Sums [t, H] from each token on, on top of `after`."""
    return x.flip(0).cumsum(0).flip(0) + after


def energy_shares(w_sq: Tensor, energy: Tensor) -> Tensor:
    """Σ_d w²/S1, [t, H]; overwrites `energy`."""
    return torch.div(w_sq, energy.clamp_min_(ENERGY_FLOOR), out=energy).sum(-1)


def scores(chunk: Chunk, shares_tH: Tensor, scoring: Scoring, channels: int) -> Tensor:
    """z/temp, [t, H]."""
    return shares_tH + chunk.score_bias(scoring, channels)


def output_of(w: Tensor, pi: Tensor, weighted: Tensor, mass: Tensor, out: Tensor) -> Tensor:
    """y = −Π·w / (1 + S2/N′), into `out`; overwrites `weighted`."""
    mass = mass + MASS_FLOOR
    return torch.mul(w, (-pi * mass)[..., None], out=out).div_(weighted.add_(mass[..., None]))


class OutputGradients(NamedTuple):
    """Gradients computed from dy, and w². The gradients of S2 and N are the terms of each token."""

    w_sq: Tensor
    dy_a: Tensor
    """dy·a, [t, H, D]."""
    dy_a_w: Tensor
    """dy·w·a, [t, H, D]."""
    d_weighted: Tensor
    """q, [t, H, D]."""
    d_mass: Tensor
    """−Σ_d q·S2/N′, [t, H]."""


def output_gradients(
    chunk: Chunk, dy: Tensor, w: Tensor, pi: Tensor, weighted_before: Tensor, mass_before: Tensor
) -> OutputGradients:
    """Given S2 and N before the chunk."""
    w_sq = chunk.product(w, w)
    weighted = chunk.product(w_sq, pi[..., None])
    running_sum_(weighted, weighted_before)
    mass = pi.cumsum(0).add_(mass_before).add_(MASS_FLOOR)
    whole = torch.add(weighted, mass[..., None], out=chunk.new())  # N′·(1 + S2/N′), so a = N′/whole
    dy_a = chunk.product(dy, mass[..., None]).div_(whole)
    dy_a_w = chunk.product(dy_a, w)
    q = chunk.product(dy_a_w, pi[..., None]).div_(whole)
    return OutputGradients(w_sq, dy_a, dy_a_w, q, -weighted.mul_(q).sum(-1) / mass)


def membership_gradient(chunk: Chunk, out: OutputGradients, d_mass: Tensor) -> Tensor:
    """dΠ [t, H], given RN at each token. `out.d_weighted` must be R2 by now."""
    return chunk.product(out.d_weighted, out.w_sq).sub_(out.dy_a_w).sum(-1) + d_mass


class ScoreGradients(NamedTuple):
    """Gradients of w² and S1, computed from dz."""

    minus_d_w_sq: Tensor
    """Through the token's own w²/S1, including its own term of S1: −u·(S1 − w²)/S1², [t, H, D]."""
    d_energy: Tensor
    """r: through S1, without the token's own term, [t, H, D]."""
    d_temp: Tensor
    """[H], summed over the chunk."""


def score_gradients(chunk: Chunk, d_z: Tensor, w_sq: Tensor, energy_before: Tensor, scoring: Scoring) -> ScoreGradients:
    """Given S1 before the chunk."""
    channels = w_sq.shape[-1]
    energy = chunk.new().copy_(w_sq)
    running_sum_(energy, energy_before)
    # S1 never decreases, so if any token is below the floor, the chunk's first is.
    constant = energy < ENERGY_FLOOR if bool((energy[0] < ENERGY_FLOOR).any()) else None
    share = torch.div(w_sq, energy.clamp_min_(ENERGY_FLOOR), out=chunk.new())
    d_temp = (d_z * scores(chunk, share.sum(-1), scoring, channels)).sum(0)
    minus_d_share = torch.div(-(scoring.temp_H * d_z)[..., None], energy, out=energy)
    if constant is not None:
        share.masked_fill_(constant, 0)
    d_energy = share.mul_(minus_d_share)
    return ScoreGradients(minus_d_share.sub_(d_energy), d_energy, d_temp)


def token_gradient(
    w: Tensor, pi: Tensor, out: OutputGradients, score: ScoreGradients, d_energy_after: Tensor
) -> Tensor:
    """dw; overwrites `out` and `score`. `out.d_weighted` must be R2, and `score.d_energy` summed from each token on.

    R1 at a token is the sum from the next token on. It is read there, because a subtraction would cancel.
    """
    through_w_sq = out.d_weighted.mul_(pi[..., None]).sub_(score.minus_d_w_sq)
    through_w_sq[:-1] += score.d_energy[1:]
    through_w_sq[-1] += d_energy_after
    return torch.addcmul(out.dy_a.mul_(-pi[..., None]), through_w_sq, w, value=2, out=out.dy_a)


def _output_gradients(
    chunk: Chunk, dy_MHD: Tensor, w_MHD: Tensor, pi_MH: Tensor, weighted_KHD: Tensor, mass_KH: Tensor
) -> OutputGradients:
    dy, w, pi = chunk.read(dy_MHD), chunk.read(w_MHD), pi_MH[chunk.tokens]
    return output_gradients(chunk, dy, w, pi, weighted_KHD[chunk.index], mass_KH[chunk.index])


def _rows(w_MHD: Tensor, layout: Layout) -> Tensor:
    return w_MHD.new_empty(len(layout.start_K), *w_MHD.shape[1:], dtype=statistics_dtype(w_MHD))


def _over_earlier_chunks(rows_K: Tensor, layout: Layout) -> Sums:
    sums_K, totals = torch.empty_like(rows_K), []
    for first, last in pairwise(layout.first_chunk_N1.tolist()):
        up_to = rows_K[first:last].cumsum(0, dtype=running_dtype(rows_K.device))
        sums_K[first:last] = torch.cat([torch.zeros_like(up_to[:1]), up_to[:-1]])
        totals.append(up_to[-1])
    return Sums(sums_K, torch.stack(totals).to(rows_K.dtype))


def _over_later_chunks(rows_K: Tensor, layout: Layout) -> Sums:
    reverse = dataclasses.replace(layout, first_chunk_N1=len(rows_K) - layout.first_chunk_N1.flip(0))
    sums = _over_earlier_chunks(rows_K.flip(0), reverse)
    return Sums(sums.chunk.flip(0), sums.document.flip(0))
