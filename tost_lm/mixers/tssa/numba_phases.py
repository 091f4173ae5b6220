"""The phases of causal TSSA for CPUs, compiled by Numba: tokens one after another, channels in vector instructions.

Interface and shapes as in `phases`, formulas as in `chunked`; t tokens of a chunk. Sums within a chunk are in the
statistics dtype, sums over chunks in float64. A product and a sum may be rounded once (`contract`). Only the sums over
the channels of a head may be reordered (`add`), which vector instructions need.
"""

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from tost_lm.mixers.layer import HeadSoftmax
from tost_lm.mixers.tssa.naive import ENERGY_FLOOR
from tost_lm.mixers.tssa.phases import LocalSoftmax, Scoring, Sums
from tost_lm.ops.layout import Layout
from tost_lm.ops.precision import MASS_FLOOR
from tost_lm.sizes import NUMBA_CHUNK_TOKENS


def _has_cache() -> bool:
    """Whether Numba finds a folder for compiled code: beside this file or in the user's home. If not, each process
    compiles."""
    try:
        njit(cache=True)(_has_cache)  # compiles nothing yet
    except RuntimeError:
        return False
    return True


CACHE = _has_cache()
compiled = njit(cache=CACHE, nogil=True, error_model="numpy", fastmath={"contract"})


def chunk_tokens(heads: int, channels: int, device: torch.device) -> int:
    """Tokens of a chunk."""
    return NUMBA_CHUNK_TOKENS


def energy(w_MHD: Tensor, layout: Layout) -> Sums:
    """(a) Σ w²."""
    return _sums(layout, _energy_rows(*_arrays(layout, w_MHD)))


def memberships(
    w_MHD: Tensor, layout: Layout, scoring: Scoring, energy_KHD: Tensor, softmax: HeadSoftmax | None = None
) -> tuple[Tensor, Sums, Sums]:
    """(b) Π, Σ Π·w² and Σ Π."""
    shares_MH = torch.from_numpy(_shares(*_arrays(layout, w_MHD, energy_KHD)))
    scores_MH = _scores(shares_MH, layout, scoring, w_MHD.shape[-1])
    pi_MH = (softmax or LocalSoftmax()).forward(scoring.temp_H * scores_MH)
    weighted_KHD, mass_KH = _weighted_rows(*_arrays(layout, w_MHD, pi_MH))
    return pi_MH, _sums(layout, weighted_KHD), _sums(layout, mass_KH)


def output(w_MHD: Tensor, layout: Layout, pi_MH: Tensor, weighted_KHD: Tensor, mass_KH: Tensor) -> Tensor:
    """(c) y."""
    return torch.from_numpy(_output(*_arrays(layout, w_MHD, pi_MH, weighted_KHD, mass_KH)))


def output_backward(
    dy_MHD: Tensor, w_MHD: Tensor, layout: Layout, pi_MH: Tensor, weighted_KHD: Tensor, mass_KH: Tensor
) -> tuple[Sums, Sums]:
    """(c′) The gradients of S2 and N."""
    d_weighted_KHD, d_mass_KH = _output_backward_rows(*_arrays(layout, dy_MHD, w_MHD, pi_MH, weighted_KHD, mass_KH))
    return _sums(layout, d_weighted_KHD, reverse=True), _sums(layout, d_mass_KH, reverse=True)


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
    sums = weighted_KHD, mass_KH, d_weighted_KHD, d_mass_KH
    d_pi_MH = torch.from_numpy(_memberships_backward(*_arrays(layout, dy_MHD, w_MHD, pi_MH, *sums)))
    d_z_MH = (softmax or LocalSoftmax()).backward(pi_MH, d_pi_MH)
    u_MH = scoring.temp_H * d_z_MH * _score_scale(layout, scoring, w_MHD.shape[-1])
    shares_MH, d_energy_KHD = _energy_backward_rows(*_arrays(layout, w_MHD, energy_KHD, u_MH))
    scores_MH = _scores(torch.from_numpy(shares_MH), layout, scoring, w_MHD.shape[-1])
    d_temp_H = (d_z_MH * scores_MH).sum(0, dtype=torch.float64).to(d_z_MH.dtype)
    return d_z_MH, d_temp_H, _sums(layout, d_energy_KHD, reverse=True)


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
    u_MH = scoring.temp_H * d_z_MH * _score_scale(layout, scoring, w_MHD.shape[-1])
    sums = energy_KHD, weighted_KHD, mass_KH, d_energy_KHD, d_weighted_KHD
    return torch.from_numpy(_energy_backward(*_arrays(layout, dy_MHD, w_MHD, pi_MH, u_MH, *sums)))


def _arrays(layout: Layout, *tensors: Tensor) -> list[Any]:
    """The bounds of chunks, and the tensors in the dtype of the first, as arrays."""
    numbers = (x.detach().to(tensors[0].dtype).contiguous() for x in tensors)
    return [x.numpy() for x in (layout.start_K, layout.end_K, *numbers)]


def _sums(layout: Layout, rows_K: np.ndarray, reverse: bool = False) -> Sums:
    sums_KC = rows_K.reshape(len(rows_K), -1)
    totals_NC = _scan(sums_KC, layout.first_chunk_N1.numpy(), reverse)
    return Sums(torch.from_numpy(rows_K), torch.from_numpy(totals_NC.reshape(-1, *rows_K.shape[1:])))


def _scores(shares_MH: Tensor, layout: Layout, scoring: Scoring, channels: int) -> Tensor:
    """z/temp, [M, H], given Σ_d w²/S1."""
    scores_MH = shares_MH * _score_scale(layout, scoring, channels)
    if scoring.bias_BHT is not None:
        scores_MH = scores_MH + scoring.bias_scale(channels) * scoring.bias_BHT.transpose(1, 2).flatten(0, 1)
    return scores_MH


def _score_scale(layout: Layout, scoring: Scoring, channels: int) -> Tensor | float:
    """The factor of Σ_d w²/S1 in the score: 1, or [M, 1] under `energy-mean`."""
    if scoring.membership != "energy-mean":
        return 1.0
    before_N = scoring.count_N - torch.tensor(layout.offsets[:-1])
    count_M = torch.arange(1, layout.offsets[-1] + 1) + before_N.repeat_interleave(layout.tokens_N)
    return (count_M.to(scoring.temp_H.dtype) / channels)[:, None]


# --- Kernels. `start_K` and `end_K` are the tokens of each chunk.


@njit(cache=CACHE, fastmath={"reassoc", "contract"})
def add(total, x):
    return total + x


@compiled
def _scan(rows_KC, first_chunk_N1, reverse):
    """In place: the sums over a document's earlier (reverse: later) rows. Returns the sums over documents, [N, C]."""
    N, C = len(first_chunk_N1) - 1, rows_KC.shape[1]
    totals_NC = np.empty((N, C), rows_KC.dtype)
    carry_C = np.empty(C, np.float64)
    for n in range(N):
        carry_C[:] = 0
        chunks = first_chunk_N1[n + 1] - first_chunk_N1[n]
        for i in range(chunks):
            row_C = rows_KC[first_chunk_N1[n + 1] - 1 - i if reverse else first_chunk_N1[n] + i]
            for c in range(C):
                own = row_C[c]
                row_C[c] = carry_C[c]
                carry_C[c] += own
        totals_NC[n] = carry_C
    return totals_NC


@compiled
def _energy_rows(start_K, end_K, w_MHD):
    _, H, D = w_MHD.shape
    rows_KHD = np.zeros((len(start_K), H, D), w_MHD.dtype)
    for k in range(len(start_K)):
        for m in range(start_K[k], end_K[k]):
            for h in range(H):
                w, row = w_MHD[m, h], rows_KHD[k, h]
                for d in range(D):
                    row[d] += w[d] * w[d]
    return rows_KHD


@compiled
def _shares(start_K, end_K, w_MHD, energy_KHD):
    M, H, D = w_MHD.shape
    number = w_MHD.dtype.type
    shares_MH = np.empty((M, H), w_MHD.dtype)
    energy_HD = np.empty((H, D), w_MHD.dtype)
    for k in range(len(start_K)):
        energy_HD[:] = 0
        for m in range(start_K[k], end_K[k]):
            for h in range(H):
                w, energy, before = w_MHD[m, h], energy_HD[h], energy_KHD[k, h]
                share = number(0)
                for d in range(D):
                    w_sq = w[d] * w[d]
                    energy[d] += w_sq
                    share = add(share, w_sq / floored(before[d] + energy[d], number(ENERGY_FLOOR)))
                shares_MH[m, h] = share
    return shares_MH


@njit(cache=CACHE)
def floored(energy, floor):
    return floor if energy < floor else energy  # NaN stays


@compiled
def _weighted_rows(start_K, end_K, w_MHD, pi_MH):
    _, H, D = w_MHD.shape
    weighted_KHD = np.zeros((len(start_K), H, D), w_MHD.dtype)
    mass_KH = np.zeros((len(start_K), H), w_MHD.dtype)
    for k in range(len(start_K)):
        for m in range(start_K[k], end_K[k]):
            for h in range(H):
                w, weighted, pi = w_MHD[m, h], weighted_KHD[k, h], pi_MH[m, h]
                mass_KH[k, h] += pi
                for d in range(D):
                    weighted[d] += pi * (w[d] * w[d])
    return weighted_KHD, mass_KH


@compiled
def _output(start_K, end_K, w_MHD, pi_MH, weighted_KHD, mass_KH):
    _, H, D = w_MHD.shape
    y_MHD = np.empty_like(w_MHD)
    weighted_HD, mass_H = np.empty((H, D), w_MHD.dtype), np.empty(H, w_MHD.dtype)
    for k in range(len(start_K)):
        weighted_HD[:], mass_H[:] = 0, w_MHD.dtype.type(MASS_FLOOR)
        for m in range(start_K[k], end_K[k]):
            for h in range(H):
                w, y, weighted, before, pi = w_MHD[m, h], y_MHD[m, h], weighted_HD[h], weighted_KHD[k, h], pi_MH[m, h]
                mass_H[h] += pi
                mass = mass_KH[k, h] + mass_H[h]
                for d in range(D):
                    weighted[d] += pi * (w[d] * w[d])
                    y[d] = -pi * mass * w[d] / (mass + (before[d] + weighted[d]))
    return y_MHD


@compiled
def _output_backward_rows(start_K, end_K, dy_MHD, w_MHD, pi_MH, weighted_KHD, mass_KH):
    _, H, D = w_MHD.shape
    number = w_MHD.dtype.type
    d_weighted_KHD = np.zeros((len(start_K), H, D), w_MHD.dtype)
    d_mass_KH = np.zeros((len(start_K), H), w_MHD.dtype)
    weighted_HD, mass_H = np.empty((H, D), w_MHD.dtype), np.empty(H, w_MHD.dtype)
    for k in range(len(start_K)):
        weighted_HD[:], mass_H[:] = 0, number(MASS_FLOOR)
        for m in range(start_K[k], end_K[k]):
            for h in range(H):
                w, dy, weighted, before, pi = w_MHD[m, h], dy_MHD[m, h], weighted_HD[h], weighted_KHD[k, h], pi_MH[m, h]
                d_weighted = d_weighted_KHD[k, h]
                mass_H[h] += pi
                mass = mass_KH[k, h] + mass_H[h]
                d_mass = number(0)
                for d in range(D):
                    weighted[d] += pi * (w[d] * w[d])
                    second = before[d] + weighted[d]
                    inverse = number(1) / (mass + second)
                    q = dy[d] * w[d] * (mass * inverse) * (pi * inverse)
                    d_weighted[d] += q
                    d_mass = add(d_mass, second * q)
                d_mass_KH[k, h] -= d_mass / mass
    return d_weighted_KHD, d_mass_KH


@compiled
def _memberships_backward(start_K, end_K, dy_MHD, w_MHD, pi_MH, weighted_KHD, mass_KH, d_weighted_KHD, d_mass_KH):
    M, H, D = w_MHD.shape
    number = w_MHD.dtype.type
    d_pi_MH = np.empty((M, H), w_MHD.dtype)
    longest = (end_K - start_K).max()
    weighted_tHD, mass_tH = np.empty((longest, H, D), w_MHD.dtype), np.empty((longest, H), w_MHD.dtype)
    d_weighted_HD, d_mass_H = np.empty((H, D), w_MHD.dtype), np.empty(H, w_MHD.dtype)
    for k in range(len(start_K)):
        _running(start_K[k], end_K[k], w_MHD, pi_MH, weighted_KHD[k], mass_KH[k], weighted_tHD, mass_tH)
        d_weighted_HD[:], d_mass_H[:] = 0, 0
        for m in range(end_K[k] - 1, start_K[k] - 1, -1):
            t = m - start_K[k]
            for h in range(H):
                w, dy, weighted, after = w_MHD[m, h], dy_MHD[m, h], weighted_tHD[t, h], d_weighted_KHD[k, h]
                pi, mass, d_weighted = pi_MH[m, h], mass_tH[t, h], d_weighted_HD[h]
                d_mass, d_pi = number(0), number(0)
                for d in range(D):
                    inverse = number(1) / (mass + weighted[d])
                    dy_a_w = dy[d] * w[d] * (mass * inverse)
                    q = dy_a_w * (pi * inverse)
                    d_weighted[d] += q
                    d_mass = add(d_mass, weighted[d] * q)
                    d_pi = add(d_pi, (after[d] + d_weighted[d]) * (w[d] * w[d]) - dy_a_w)
                d_mass_H[h] -= d_mass / mass
                d_pi_MH[m, h] = d_pi + (d_mass_KH[k, h] + d_mass_H[h])
    return d_pi_MH


@compiled
def _running(start, end, w_MHD, pi_MH, before_HD, mass_H, weighted_tHD, mass_tH):
    """S2 and N′ at each token of a chunk, into `weighted_tHD` and `mass_tH`."""
    _, H, D = w_MHD.shape
    weighted_HD, own_H = np.zeros((H, D), w_MHD.dtype), np.full(H, w_MHD.dtype.type(MASS_FLOOR))
    for m in range(start, end):
        for h in range(H):
            w, weighted, own, before, pi = (
                w_MHD[m, h],
                weighted_tHD[m - start, h],
                weighted_HD[h],
                before_HD[h],
                pi_MH[m, h],
            )
            own_H[h] += pi
            mass_tH[m - start, h] = mass_H[h] + own_H[h]
            for d in range(D):
                own[d] += pi * (w[d] * w[d])
                weighted[d] = before[d] + own[d]


@compiled
def _energy_backward_rows(start_K, end_K, w_MHD, energy_KHD, u_MH):
    """Σ_d w²/S1 [M, H], and the sums of each chunk of S1's gradient [K, H, D]."""
    M, H, D = w_MHD.shape
    number = w_MHD.dtype.type
    floor = number(ENERGY_FLOOR)
    shares_MH = np.empty((M, H), w_MHD.dtype)
    rows_KHD = np.zeros((len(start_K), H, D), w_MHD.dtype)
    energy_HD = np.empty((H, D), w_MHD.dtype)
    for k in range(len(start_K)):
        energy_HD[:] = 0
        for m in range(start_K[k], end_K[k]):
            for h in range(H):
                w, own, before, row, u = w_MHD[m, h], energy_HD[h], energy_KHD[k, h], rows_KHD[k, h], u_MH[m, h]
                total = number(0)
                for d in range(D):
                    w_sq = w[d] * w[d]
                    own[d] += w_sq
                    energy = before[d] + own[d]
                    share = w_sq / floored(energy, floor)
                    total = add(total, share)
                    row[d] -= (number(0) if energy < floor else share) * (u / floored(energy, floor))
                shares_MH[m, h] = total
    return shares_MH, rows_KHD


@compiled
def _energy_backward(
    start_K, end_K, dy_MHD, w_MHD, pi_MH, u_MH, energy_KHD, weighted_KHD, mass_KH, d_energy_KHD, d_weighted_KHD
):
    _, H, D = w_MHD.shape
    number = w_MHD.dtype.type
    floor = number(ENERGY_FLOOR)
    dw_MHD = np.empty_like(w_MHD)
    longest = (end_K - start_K).max()
    weighted_tHD, mass_tH = np.empty((longest, H, D), w_MHD.dtype), np.empty((longest, H), w_MHD.dtype)
    energy_tHD = np.empty((longest, H, D), w_MHD.dtype)
    d_weighted_HD, d_energy_HD = np.empty((H, D), w_MHD.dtype), np.empty((H, D), w_MHD.dtype)
    for k in range(len(start_K)):
        _running(start_K[k], end_K[k], w_MHD, pi_MH, weighted_KHD[k], mass_KH[k], weighted_tHD, mass_tH)
        _running_energy(start_K[k], end_K[k], w_MHD, energy_KHD[k], energy_tHD)
        d_weighted_HD[:], d_energy_HD[:] = 0, 0
        for m in range(end_K[k] - 1, start_K[k] - 1, -1):
            t = m - start_K[k]
            for h in range(H):
                w, dy, dw, weighted, energy = (
                    w_MHD[m, h],
                    dy_MHD[m, h],
                    dw_MHD[m, h],
                    weighted_tHD[t, h],
                    energy_tHD[t, h],
                )
                pi, mass, u = pi_MH[m, h], mass_tH[t, h], u_MH[m, h]
                d_weighted, d_energy = d_weighted_HD[h], d_energy_HD[h]
                after_weighted, after_energy = d_weighted_KHD[k, h], d_energy_KHD[k, h]
                # Three loops: LLVM vectorizes none that has too many arrays to check for overlaps.
                for d in range(D):
                    inverse = number(1) / (mass + weighted[d])
                    dy_a = dy[d] * (mass * inverse)
                    d_weighted[d] += dy_a * w[d] * (pi * inverse)
                    dw[d] = dy_a * pi
                for d in range(D):
                    # The share is exactly 1 at a document's first token, where the two terms of the difference cancel.
                    share = number(0) if energy[d] < floor else w[d] * w[d] / floored(energy[d], floor)
                    d_share = u / floored(energy[d], floor)
                    through_energy = share * d_share
                    energy[d] = (d_share - through_energy) + (after_energy[d] + d_energy[d])
                    d_energy[d] -= through_energy
                for d in range(D):
                    dw[d] = number(2) * w[d] * (pi * (after_weighted[d] + d_weighted[d]) + energy[d]) - dw[d]
    return dw_MHD


@compiled
def _running_energy(start, end, w_MHD, before_HD, energy_tHD):
    """S1 at each token of a chunk, into `energy_tHD`."""
    _, H, D = w_MHD.shape
    own_HD = np.zeros((H, D), w_MHD.dtype)
    for m in range(start, end):
        for h in range(H):
            w, energy, own, before = w_MHD[m, h], energy_tHD[m - start, h], own_HD[h], before_HD[h]
            for d in range(D):
                own[d] += w[d] * w[d]
                energy[d] = before[d] + own[d]


# The first call prepares Numba, which takes a second: here, so that processes forked after the import are spared it.
_scan(np.zeros((0, 1)), np.zeros(1, np.int64), False)
