"""Causal TSSA in PyTorch, chunk by chunk, with its closed-form backward; it stores w, Π and the sums before each chunk.

The forward is one pass over the chunks, the backward one pass in reverse. A chunk fits the cache, so w is read once
forward, and w and dy once backward. `chunked_phases` builds separate phases from the same functions of one chunk.

Source: arXiv 2412.17810, released causal form; the backward is derived from it. With a = 1/(1 + S2/N′), N′ = N + 1e-8
and u = scale·temp·dz:

    q  = dy·w·Π·a²/N′           R2 = Σ_{s≥t} q       RN = Σ_{s≥t} −Σ_d q·S2/N′
    dΠ = −Σ_d dy·w·a + Σ_d R2·w² + RN                dz = Π·(dΠ − Σ_h Π·dΠ)
    r  = −u·w²/S1²              R1 = Σ_{s>t} r
    dw = −dy·Π·a + 2w·(Π·R2 + u·(S1 − w²)/S1² + R1)

The token's own term of S1's gradient is combined with that of w²/S1, because the two cancel at a document's first
token; so R1 sums later tokens only. Where S1 is below its floor, the floor replaces it and has no gradient.

Shapes: t tokens of a chunk, H heads, D channels a head; M, N and K as in `phases`.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tost_lm.ops.layout import Layout
from tost_lm.ops.naive import ENERGY_FLOOR, MASS_FLOOR, running_dtype, statistics_dtype
from tost_lm.ops.phases import HeadSoftmax, LocalSoftmax, Scoring, Statistics
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
    """Tokens `tokens` of document `document`."""

    def __init__(self, index: int, document: int, start: int, end: int, layout: Layout, scratch: Scratch):
        self.index, self.document, self.tokens = index, document, slice(start, end)
        self.is_first = start == layout.offsets[document]
        self.is_last = end == layout.offsets[document + 1]
        self._length = end - start
        self._earlier_in_document = start - layout.offsets[document]
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

    def score_scale(self, scoring: Scoring, channels: int) -> Tensor | float:
        """The factor of Σ_d w²/S1 in the score: 1, or [t, 1] under `energy-mean`."""
        if scoring.membership != "energy-mean":
            return 1.0
        first = scoring.count_N[self.document] + self._earlier_in_document + 1
        count_t = first + torch.arange(self._length, device=scoring.temp_H.device)
        return (count_t.to(scoring.temp_H.dtype) / channels)[:, None]

    def score_bias(self, scoring: Scoring, channels: int) -> Tensor | float:
        """The bias in the score, [t, H] or 0."""
        if scoring.bias_BHT is None:
            return 0.0
        b, t = divmod(self.tokens.start, scoring.bias_BHT.shape[-1])
        return scoring.bias_scale(channels) * scoring.bias_BHT[b, :, t : t + self._length].T


def chunks(w_MHD: Tensor, layout: Layout, newest_first: bool = False) -> Iterator[Chunk]:
    """All chunks, oldest first or newest first. The next chunk reuses the scratch memory of this one."""
    scratch = Scratch(w_MHD, layout)
    rows = zip(layout.document_K.tolist(), layout.start_K.tolist(), layout.end_K.tolist(), strict=True)
    numbered = list(enumerate(rows))
    for index, (document, start, end) in reversed(numbered) if newest_first else numbered:
        scratch.reset()
        yield Chunk(index, document, start, end, layout, scratch)


SCAN_ROWS = 16


def running_sum_(x: Tensor, carry: Tensor, newest_first: bool = False) -> Tensor:
    """In place: sums over time up to and including each token, or from each token on, on top of `carry`.

    Args:
        x: [t, H, D].
        carry: [H, D], the sum over the tokens before, or after.
        newest_first: sum from each token on.

    Returns:
        The sum of x alone, [H, D].
    """
    if not x.is_cpu:
        sums = x.flip(0).cumsum(0).flip(0) if newest_first else x.cumsum(0)
        total = sums[0 if newest_first else -1].clone()
        x.copy_(sums.add_(carry))
        return total
    # On a CPU torch.cumsum over the first dimension adds one scalar at a time. Adding whole rows takes a fifth of its
    # time: first within all groups of 16 rows at once, then over the groups, then the sums of earlier groups to each.
    groups = len(x) // SCAN_ROWS
    if groups < 2:
        rows = x.unbind(0)[:: -1 if newest_first else 1]
        for earlier, row in pairwise(rows):
            row.add_(earlier)
        total = rows[-1].clone()
        x.add_(carry)
        return total
    grouped, rest = x[: groups * SCAN_ROWS].unflatten(0, (groups, SCAN_ROWS)), x[groups * SCAN_ROWS :]
    rest_total = running_sum_(rest, carry, newest_first) if newest_first and len(rest) else 0
    steps = grouped.unbind(1)[:: -1 if newest_first else 1]
    for earlier, row in pairwise(steps):
        row.add_(earlier)
    sums_of_groups = steps[-1].clone()
    carry = carry + rest_total
    total = running_sum_(sums_of_groups, carry, newest_first)
    first, later, sums = (
        (-1, grouped[:-1], sums_of_groups[1:]) if newest_first else (0, grouped[1:], sums_of_groups[:-1])
    )
    grouped[first].add_(carry)
    later.add_(sums[:, None])
    if len(rest) and not newest_first:
        rest_total = running_sum_(rest, carry + total)
    return total + rest_total


def chunk_tokens(heads: int, channels: int, device: torch.device) -> int:
    """Tokens of a chunk. At least 32: the sums stored for each chunk then take at most about 1/16 of the memory of a
    float32 w (more if documents are shorter)."""
    return max(32, _chunk_elements(device) // (heads * channels) // SCAN_ROWS * SCAN_ROWS)


def rows_in_chunk(w_BTHD: Tensor) -> int:
    """Rows that fit one chunk."""
    return _chunk_elements(w_BTHD.device) // w_BTHD[0].numel()


def _chunk_elements(device: torch.device) -> int:
    return CPU_CHUNK_ELEMENTS if device.type == "cpu" else DEVICE_CHUNK_ELEMENTS


def forward(
    w_MHD: Tensor, layout: Layout, scoring: Scoring, initial: Statistics, softmax: HeadSoftmax | None
) -> tuple[Tensor, Tensor, Statistics, Statistics]:
    """y [M, H, D], Π [M, H], the sums before each chunk [K, …] and after each document [N, …]."""
    dtype, softmax = statistics_dtype(w_MHD), softmax or LocalSoftmax()
    y_MHD = torch.empty_like(w_MHD)
    pi_MH = w_MHD.new_empty(w_MHD.shape[:2], dtype=dtype)
    before = Statistics(*(x.new_empty(len(layout.start_K), *x.shape[1:], dtype=dtype) for x in initial))
    final = Statistics(*map(torch.empty_like, initial))
    running = _running(initial, 0)
    D = w_MHD.shape[-1]
    for chunk in chunks(w_MHD, layout):
        if chunk.is_first:
            running = _running(initial, chunk.document)
        k = chunk.index
        _store(before, k, running)
        w = chunk.read(w_MHD)
        w_sq, energy = chunk.product(w, w), chunk.product(w, w)
        energy_total = running_sum_(energy, before.energy[k])
        pi = pi_MH[chunk.tokens] = softmax.forward(
            scoring.temp_H * scores(chunk, energy_shares(w_sq, energy), scoring, D)
        )
        weighted = w_sq.mul_(pi[..., None])
        weighted_total = running_sum_(weighted, before.weighted[k])
        mass, mass_total = prefix(pi, before.mass[k])
        y_MHD[chunk.tokens] = output_of(w, pi, weighted, mass, out=energy)
        running = _add(running, Statistics(energy_total, weighted_total, mass_total))
        if chunk.is_last:
            _store(final, chunk.document, running)
    return y_MHD, pi_MH, before, final


def backward(
    dy_MHD: Tensor,
    w_MHD: Tensor,
    layout: Layout,
    scoring: Scoring,
    pi_MH: Tensor,
    before: Statistics,
    d_final: Statistics,
    softmax: HeadSoftmax | None,
) -> tuple[Tensor, Tensor, Tensor, Statistics]:
    """dw [M, H, D], dz [M, H], d temp [H], and the gradients of the sums before each document [N, …]."""
    dtype, softmax = statistics_dtype(w_MHD), softmax or LocalSoftmax()
    dw_MHD = torch.empty_like(w_MHD)
    d_z_MH = torch.empty_like(pi_MH)
    d_temp_H = torch.zeros_like(scoring.temp_H, dtype=running_dtype(w_MHD.device))
    d_initial = Statistics(*map(torch.empty_like, d_final))
    running = _running(d_final, 0)
    for chunk in chunks(w_MHD, layout, newest_first=True):
        if chunk.is_last:
            running = _running(d_final, chunk.document)
        k, after = chunk.index, Statistics(*(x.to(dtype) for x in running))
        w, dy, pi = chunk.read(w_MHD), chunk.read(dy_MHD), pi_MH[chunk.tokens]
        out = output_gradients(chunk, dy, w, pi, before.weighted[k], before.mass[k])
        d_weighted_total = running_sum_(out.d_weighted, after.weighted, newest_first=True)
        d_mass, d_mass_total = suffix(out.d_mass, after.mass)
        d_z = d_z_MH[chunk.tokens] = softmax.backward(pi, membership_gradient(chunk, out, d_mass))
        score = score_gradients(chunk, d_z, out.w_sq, before.energy[k], scoring)
        d_energy_total = running_sum_(score.d_energy, after.energy, newest_first=True)
        dw_MHD[chunk.tokens] = token_gradient(w, pi, out, score, after.energy)
        d_temp_H += score.d_temp
        running = _add(running, Statistics(d_energy_total, d_weighted_total, d_mass_total))
        if chunk.is_first:
            _store(d_initial, chunk.document, running)
    return dw_MHD, d_z_MH, d_temp_H.to(dtype), d_initial


# --- Functions of one chunk: [t, H, D] and [t, H]. Tensors of w's size are in the chunk's scratch memory.


def prefix(x: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Sums [t, H] up to and including each token, on top of `before`; and the chunk's own sum."""
    sums = x.cumsum(0)
    return sums + before, sums[-1]


def suffix(x: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Sums [t, H] from each token on, on top of `after`; and the chunk's own sum."""
    sums = x.flip(0).cumsum(0).flip(0)
    return sums + after, sums[0]


def energy_shares(w_sq: Tensor, energy: Tensor) -> Tensor:
    """Σ_d w²/S1, [t, H]; overwrites `energy`."""
    return torch.div(w_sq, energy.clamp_min_(ENERGY_FLOOR), out=energy).sum(-1)


def scores(chunk: Chunk, shares_tH: Tensor, scoring: Scoring, channels: int) -> Tensor:
    """z/temp, [t, H]."""
    return shares_tH * chunk.score_scale(scoring, channels) + chunk.score_bias(scoring, channels)


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
    mass = prefix(pi, mass_before)[0].add_(MASS_FLOOR)
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
    u = scoring.temp_H * d_z * chunk.score_scale(scoring, channels)
    minus_d_share = torch.div(-u[..., None], energy, out=energy)
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


# --- Running sums over many chunks.


def _running(statistics: Statistics, n: int) -> Statistics:
    return Statistics(*(x[n].to(running_dtype(x.device)) for x in statistics))


def _add(running: Statistics, more: Statistics) -> Statistics:
    return Statistics(*(x + y for x, y in zip(running, more, strict=True)))


def _store(rows: Statistics, row: int, values: Statistics) -> None:
    for x, value in zip(rows, values, strict=True):
        x[row] = value
