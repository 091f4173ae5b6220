"""The phases of the chunked backend: `chunked` split where carries and the softmax over other ranks' heads enter.

Each phase is a pass over all chunks, so w is read three times where `chunked` reads it once. Interface and shapes as in
`phases`.
"""

import dataclasses
from itertools import pairwise

import torch
from torch import Tensor

from tost_lm.ops.chunked import (
    Chunk,
    OutputGradients,
    chunks,
    energy_shares,
    membership_gradient,
    output_gradients,
    output_of,
    prefix,
    running_sum_,
    score_gradients,
    scores,
    suffix,
    token_gradient,
)
from tost_lm.ops.chunked import chunk_tokens as chunk_tokens
from tost_lm.ops.layout import Layout
from tost_lm.ops.naive import statistics_dtype
from tost_lm.ops.phases import HeadSoftmax, LocalSoftmax, Scoring, Sums


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
        mass, _ = prefix(pi, mass_KH[chunk.index])
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
        d_mass, _ = suffix(out.d_mass, d_mass_KH[chunk.index])
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
        up_to = rows_K[first:last].cumsum(0)
        sums_K[first:last] = torch.cat([torch.zeros_like(up_to[:1]), up_to[:-1]])
        totals.append(up_to[-1])
    return Sums(sums_K, torch.stack(totals))


def _over_later_chunks(rows_K: Tensor, layout: Layout) -> Sums:
    reverse = dataclasses.replace(layout, first_chunk_N1=len(rows_K) - layout.first_chunk_N1.flip(0))
    sums = _over_earlier_chunks(rows_K.flip(0), reverse)
    return Sums(sums.chunk.flip(0), sums.document.flip(0))
