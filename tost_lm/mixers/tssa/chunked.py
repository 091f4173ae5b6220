"""The phases of causal TSSA in PyTorch, chunk by chunk, for any device and dtype. A chunk fits the cache of a CPU.

Shapes as in `phases`; t tokens of a chunk.

Source: arXiv 2412.17810, released causal form; the backward is derived from it. With a = 1/(1 + S2/N′), N′ = N + 1e-8
and u = temp·dz:

    q  = dy·w·Π·a²/N′           R2 = Σ_{s≥t} q       RN = Σ_{s≥t} −Σ_d q·S2/N′
    dΠ = −Σ_d dy·w·a + Σ_d R2·w² + RN                dz = Π·(dΠ − Σ_h Π·dΠ)
    r  = −u·w²/S1²              R1 = Σ_{s>t} r
    dw = −dy·Π·a + 2w·(Π·R2 + u·(S1 − w²)/S1² + R1)

The token's own term of S1's gradient is combined with that of w²/S1, because the two cancel at a document's first
token; so R1 sums later tokens only. Where S1 is below its floor, the floor replaces it and has no gradient.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tost_lm.mixers.layer import HeadSoftmax
from tost_lm.mixers.tssa.phases import Inputs, Stored, Sums
from tost_lm.mixers.tssa.statistics import ENERGY_FLOOR
from tost_lm.ops.precision import MASS_FLOOR, running_dtype, statistics_dtype
from tost_lm.sizes import CPU_CHUNK_ELEMENTS, DEVICE_CHUNK_ELEMENTS


class Chunk:
    """Tokens `tokens` of a document. The memory of its tensors is `scratch`, which all chunks reuse: allocating new
    memory costs more time than the arithmetic."""

    def __init__(self, index: int, start: int, end: int, inputs: Inputs, scratch: list[Tensor]):
        self.index, self.tokens, self.inputs = index, slice(start, end), inputs
        self._scratch, self._free = scratch, [x[: end - start] for x in scratch]

    def new(self) -> Tensor:
        """An uninitialised tensor [t, H, D] in the statistics dtype, valid until `free` or the next chunk."""
        if not self._free:
            w_MHD = self.inputs.w_MHD
            longest = min(self.inputs.layout.chunk_tokens, len(w_MHD))
            self._scratch.append(w_MHD.new_empty(longest, *w_MHD.shape[1:], dtype=statistics_dtype(w_MHD)))
            self._free.append(self._scratch[-1][: self.tokens.stop - self.tokens.start])
        return self._free.pop()

    def free(self, *tensors: Tensor) -> None:
        """Tensors of `new` that nobody reads any more, for other calls of `new`."""
        self._free += tensors

    def read(self, x_MHD: Tensor) -> Tensor:
        """The chunk's tokens in the statistics dtype; do not modify them."""
        x = x_MHD[self.tokens]
        return x if x.dtype == statistics_dtype(x) else self.new().copy_(x)

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        """x · y in scratch memory."""
        return torch.mul(x, y, out=self.new())

    def scores(self, shares_tH: Tensor) -> Tensor:
        """z/temp from Σ_d w²/S1, [t, H]."""
        bias_BHT = self.inputs.bias_BHT
        if bias_BHT is None:
            return shares_tH
        b, t = divmod(self.tokens.start, bias_BHT.shape[-1])
        channels, length = self.inputs.w_MHD.shape[-1], len(shares_tH)
        return shares_tH + channels * bias_BHT[b, :, t : t + length].T


def chunks(inputs: Inputs) -> Iterator[Chunk]:
    """All chunks. The next chunk reuses the scratch memory of this one."""
    yield from _Running(inputs, ())


def chunk_tokens(heads: int, channels: int, device: torch.device) -> int:
    """Tokens of a chunk. At least 32: the sums stored for each chunk then take at most about 1/16 of the memory of a
    float32 w (more if documents are shorter)."""
    elements = CPU_CHUNK_ELEMENTS if device.type == "cpu" else DEVICE_CHUNK_ELEMENTS
    return max(32, elements // (heads * channels) // SCAN_ROWS * SCAN_ROWS)


def energy(inputs: Inputs) -> Sums:
    """(a) Σ w²."""
    sums = _Running(inputs, _zeros(inputs)[:1])
    for chunk in sums:
        w = chunk.read(inputs.w_MHD)
        sums.add(chunk.product(w, w).sum(0))
    return sums.here()[0]


def memberships(inputs: Inputs, energy_KHD: Tensor) -> tuple[Tensor, Sums, Sums]:
    """(b) Π [M, H], Σ Π·w² and Σ Π, given S1 before each chunk."""
    w_MHD = inputs.w_MHD
    z_MH = w_MHD.new_empty(w_MHD.shape[:2], dtype=statistics_dtype(w_MHD))
    for chunk in chunks(inputs):
        w = chunk.read(w_MHD)
        z_MH[chunk.tokens] = scores(chunk, chunk.product(w, w), energy_KHD[chunk.index])
    pi_MH = (inputs.softmax or HeadSoftmax()).forward(z_MH)
    sums = _Running(inputs, _zeros(inputs)[1:])
    for chunk in sums:
        w, pi = chunk.read(w_MHD), pi_MH[chunk.tokens]
        sums.add(chunk.product(w, w).mul_(pi[..., None]).sum(0), pi.sum(0))
    weighted, mass = sums.here()
    return pi_MH, weighted, mass


def output(inputs: Inputs, stored: Stored) -> Tensor:
    """(c) y = −Π·w / (1 + S2/N′), [M, H, D] in w's dtype."""
    y_MHD = torch.empty_like(inputs.w_MHD)
    for chunk in chunks(inputs):
        w, pi = chunk.read(inputs.w_MHD), stored.pi_MH[chunk.tokens]
        weighted = chunk.product(w, w).mul_(pi[..., None])
        write_output(chunk, y_MHD, w, pi, weighted, stored.weighted_KHD[chunk.index], stored.mass_KH[chunk.index])
    return y_MHD


def output_backward(dy_MHD: Tensor, inputs: Inputs, stored: Stored) -> tuple[Sums, Sums]:
    """(c′) The gradients of S2 and N."""
    sums = _Running(inputs, _zeros(inputs)[1:], newest_first=True)
    for chunk in sums:
        out = output_gradients(chunk, dy_MHD, stored)
        sums.add(out.d_weighted.sum(0), out.d_mass.sum(0))
    d_weighted, d_mass = sums.here()
    return d_weighted, d_mass


def memberships_backward(
    dy_MHD: Tensor, inputs: Inputs, stored: Stored, d_weighted_KHD: Tensor, d_mass_KH: Tensor
) -> tuple[Tensor, Tensor, Sums]:
    """(b′) The gradients of z [M, H] and of temp [H], and of S1, given R2 and RN after each chunk."""
    d_pi_MH = torch.empty_like(stored.pi_MH)
    for chunk in chunks(inputs):
        out = output_gradients(chunk, dy_MHD, stored)
        running_sum_(out.d_weighted, d_weighted_KHD[chunk.index], newest_first=True)
        d_pi_MH[chunk.tokens] = membership_gradients(chunk, out, d_mass_KH[chunk.index])
    d_z_MH = (inputs.softmax or HeadSoftmax()).backward(stored.pi_MH, d_pi_MH)
    d_temp_KH = [inputs.temp_H] * len(stored.mass_KH)
    sums = _Running(inputs, _zeros(inputs)[:1], newest_first=True)
    for chunk in sums:
        w = chunk.read(inputs.w_MHD)
        score = score_gradients(chunk, d_z_MH[chunk.tokens], chunk.product(w, w), stored.energy_KHD[chunk.index])
        d_temp_KH[chunk.index] = score.d_temp
        sums.add(score.d_energy.sum(0))
    return d_z_MH, sum(d_temp_KH, torch.zeros_like(inputs.temp_H)), sums.here()[0]


def energy_backward(
    dy_MHD: Tensor, inputs: Inputs, stored: Stored, d_z_MH: Tensor, d_energy_KHD: Tensor, d_weighted_KHD: Tensor
) -> Tensor:
    """(a′) dw [M, H, D] in w's dtype, given R1 and R2 after each chunk."""
    dw_MHD = torch.empty_like(inputs.w_MHD)
    for chunk in chunks(inputs):
        out = output_gradients(chunk, dy_MHD, stored)
        running_sum_(out.d_weighted, d_weighted_KHD[chunk.index], newest_first=True)
        score = score_gradients(chunk, d_z_MH[chunk.tokens], out.w_sq, stored.energy_KHD[chunk.index])
        write_input_gradient(chunk, dw_MHD, stored.pi_MH[chunk.tokens], out, score, d_energy_KHD[chunk.index])
    return dw_MHD


# --- All phases in one pass over the chunks, where no rank has other tokens or heads. The results are the same.


def all_phases(inputs: Inputs, initial_N: Sequence[Tensor]) -> tuple[Tensor, Stored, list[Tensor]]:
    """y [M, H, D], what the backward reads, and the final statistics (none without initial ones)."""
    y_MHD, softmax = torch.empty_like(inputs.w_MHD), HeadSoftmax()
    pi_MH = y_MHD.new_empty(y_MHD.shape[:2], dtype=statistics_dtype(y_MHD))
    sums = _Running(inputs, _zeros(inputs), initial_N)
    for chunk in sums:
        w, (energy, weighted, mass) = chunk.read(inputs.w_MHD), sums.before
        w_sq = chunk.product(w, w)
        energy_here = w_sq.sum(0)
        pi_MH[chunk.tokens] = pi = softmax.forward(scores(chunk, w_sq, energy))
        terms = w_sq.mul_(pi[..., None])
        sums.add(energy_here, terms.sum(0), pi.sum(0))
        write_output(chunk, y_MHD, w, pi, terms, weighted, mass)
    return y_MHD, Stored(pi_MH, *(x.chunk for x in sums.here())), sums.finals()


def all_phases_backward(
    dy_MHD: Tensor, inputs: Inputs, stored: Stored, d_final_N: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """dw [M, H, D], dz [M, H], and the gradients of temp [H] and of the initial statistics."""
    dw_MHD, d_z_MH, softmax = torch.empty_like(inputs.w_MHD), torch.empty_like(stored.pi_MH), HeadSoftmax()
    d_temp_KH = [inputs.temp_H] * len(stored.mass_KH)
    sums = _Running(inputs, _zeros(inputs), d_final_N, newest_first=True)
    for chunk in sums:
        pi, (d_energy, d_weighted, d_mass) = stored.pi_MH[chunk.tokens], sums.before
        out = output_gradients(chunk, dy_MHD, stored)
        d_weighted_here = out.d_weighted.sum(0)
        running_sum_(out.d_weighted, d_weighted, newest_first=True)
        d_z_MH[chunk.tokens] = d_z = softmax.backward(pi, membership_gradients(chunk, out, d_mass))
        score = score_gradients(chunk, d_z, out.w_sq, stored.energy_KHD[chunk.index])
        d_temp_KH[chunk.index] = score.d_temp
        sums.add(score.d_energy.sum(0), d_weighted_here, out.d_mass.sum(0))
        write_input_gradient(chunk, dw_MHD, pi, out, score, d_energy)
    return dw_MHD, d_z_MH, sum(d_temp_KH, torch.zeros_like(inputs.temp_H)), sums.finals()


def _zeros(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """S1, S2 and N of no tokens."""
    w_MHD = inputs.w_MHD
    zeros_HD = w_MHD.new_zeros(w_MHD.shape[1:], dtype=running_dtype(w_MHD.device))
    return zeros_HD, zeros_HD, zeros_HD[:, 0]


class _Running:
    """The chunks of each document in turn, and sums of some of S1, S2 and N, or of their gradients, over the chunks of
    the document so far, on top of what is outside."""

    def __init__(
        self, inputs: Inputs, zeros: Sequence[Tensor], outside_N: Sequence[Tensor] = (), newest_first: bool = False
    ):
        """`outside_N`: of each document; empty: 0."""
        self._inputs, self._zeros, self._outside_N, self._newest_first = inputs, zeros, outside_N, newest_first
        self._dtype = statistics_dtype(inputs.w_MHD)
        self._before_K, self._sums_N = [[]] * len(inputs.layout.start_K), []

    def __iter__(self) -> Iterator[Chunk]:
        scratch, layout = [], self._inputs.layout
        starts, ends = layout.start_K.tolist(), layout.end_K.tolist()
        for document, (first, last) in enumerate(pairwise(layout.first_chunk_N1.tolist())):
            self._sums = self._zeros
            for index in range(first, last)[:: -1 if self._newest_first else 1]:
                before = [x.to(self._dtype) for x in self._sums]
                if self._outside_N:
                    before = [x + outside_N[document] for x, outside_N in zip(before, self._outside_N, strict=True)]
                self.before = self._before_K[index] = before
                yield Chunk(index, starts[index], ends[index], self._inputs, scratch)
            self._sums_N.append([x.to(self._dtype) for x in self._sums])

    def add(self, *terms: Tensor) -> None:
        """Those of the chunk."""
        self._sums = [x + term for x, term in zip(self._sums, terms, strict=True)]

    def here(self) -> list[Sums]:
        return [Sums(*sums) for sums in zip(_stack(self._before_K), _stack(self._sums_N), strict=True)]

    def finals(self) -> list[Tensor]:
        """The sums over whole documents; none without sums outside."""
        return [outside_N + here.document for outside_N, here in zip(self._outside_N, self.here(), strict=False)]


def _stack(rows: Sequence[Sequence[Tensor]]) -> Iterator[Tensor]:
    return map(torch.stack, zip(*rows, strict=True))


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


def scores(chunk: Chunk, w_sq: Tensor, energy_before: Tensor) -> Tensor:
    """z [t, H], given S1 before the chunk."""
    energy = chunk.new().copy_(w_sq)
    running_sum_(energy, energy_before)
    _set_floor_(energy)
    shares = torch.div(w_sq, energy, out=energy).sum(-1)
    chunk.free(energy)
    return chunk.inputs.temp_H * chunk.scores(shares)


def write_output(
    chunk: Chunk, y_MHD: Tensor, w: Tensor, pi: Tensor, weighted: Tensor, weighted_before: Tensor, mass_before: Tensor
) -> None:
    """Given Π·w², which changes, and S2 and N before the chunk."""
    running_sum_(weighted, weighted_before)
    mass = pi.cumsum(0) + mass_before + MASS_FLOOR
    y = y_MHD[chunk.tokens]
    scratch = y if y.dtype == w.dtype else chunk.new()
    torch.mul(w, (-pi * mass)[..., None], out=scratch).div_(weighted.add_(mass[..., None]))
    if scratch is not y:
        y.copy_(scratch)


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


def output_gradients(chunk: Chunk, dy_MHD: Tensor, stored: Stored) -> OutputGradients:
    dy, w, pi = chunk.read(dy_MHD), chunk.read(chunk.inputs.w_MHD), stored.pi_MH[chunk.tokens]
    w_sq = chunk.product(w, w)
    weighted = chunk.product(w_sq, pi[..., None])
    running_sum_(weighted, stored.weighted_KHD[chunk.index])
    mass = pi.cumsum(0).add_(stored.mass_KH[chunk.index]).add_(MASS_FLOOR)
    whole = torch.add(weighted, mass[..., None], out=chunk.new())  # N′·(1 + S2/N′), so a = N′/whole
    dy_a = chunk.product(dy, mass[..., None]).div_(whole)
    dy_a_w = chunk.product(dy_a, w)
    q = chunk.product(dy_a_w, pi[..., None]).div_(whole)
    d_mass = -weighted.mul_(q).sum(-1) / mass
    chunk.free(weighted, whole)
    return OutputGradients(w_sq, dy_a, dy_a_w, q, d_mass)


def membership_gradients(chunk: Chunk, out: OutputGradients, d_mass_after: Tensor) -> Tensor:
    """dΠ [t, H], given R2 in place of its terms, and RN after the chunk. Frees dy·w·a."""
    d_mass = out.d_mass.flip(0).cumsum(0).flip(0) + d_mass_after
    terms = chunk.product(out.d_weighted, out.w_sq).sub_(out.dy_a_w)
    d_pi = (terms.sum(-1) + d_mass).to(out.w_sq.dtype)
    chunk.free(terms, out.dy_a_w)
    return d_pi


class ScoreGradients(NamedTuple):
    """Gradients of w² and S1, computed from dz."""

    minus_d_w_sq: Tensor
    """Through the token's own w²/S1, including its own term of S1: −u·(S1 − w²)/S1², [t, H, D]."""
    d_energy: Tensor
    """r: through S1, without the token's own term, [t, H, D]."""
    d_temp: Tensor
    """[H], summed over the chunk."""


def score_gradients(chunk: Chunk, d_z: Tensor, w_sq: Tensor, energy_before: Tensor) -> ScoreGradients:
    """Given S1 before the chunk."""
    energy = chunk.new().copy_(w_sq)
    running_sum_(energy, energy_before)
    constant = _set_floor_(energy)
    share = torch.div(w_sq, energy, out=chunk.new())
    d_temp = (d_z * chunk.scores(share.sum(-1))).sum(0)
    minus_d_share = torch.div(-(chunk.inputs.temp_H * d_z)[..., None], energy, out=energy)
    if constant is not None:
        share.masked_fill_(constant, 0)
    d_energy = share.mul_(minus_d_share)
    return ScoreGradients(minus_d_share.sub_(d_energy), d_energy, d_temp)


def write_input_gradient(
    chunk: Chunk, dw_MHD: Tensor, pi: Tensor, out: OutputGradients, score: ScoreGradients, d_energy_after: Tensor
) -> None:
    """Given R2 in place of its terms, and R1 after the chunk."""
    running_sum_(score.d_energy, d_energy_after, newest_first=True)
    # R1 at a token is the sum from the next token on. It is read there, because a subtraction would cancel.
    through_w_sq = out.d_weighted.mul_(pi[..., None]).sub_(score.minus_d_w_sq)
    through_w_sq[:-1] += score.d_energy[1:]
    through_w_sq[-1] += d_energy_after
    dw, dy_a = dw_MHD[chunk.tokens], out.dy_a.mul_(-pi[..., None])
    scratch = dw if dw.dtype == dy_a.dtype else dy_a
    torch.addcmul(dy_a, through_w_sq, chunk.read(chunk.inputs.w_MHD), value=2, out=scratch)
    if scratch is not dw:
        dw.copy_(scratch)


def _set_floor_(energy: Tensor) -> Tensor | None:
    """Which S1 are below the floor and were replaced; None: none are."""
    # S1 never decreases, so if any token is below the floor, the chunk's first is.
    if not bool((energy[0] < ENERGY_FLOOR).any()):
        return None
    below = energy < ENERGY_FLOOR
    energy.clamp_min_(ENERGY_FLOOR)
    return below
