"""The backward phases: (c′) output, (b′) memberships, (a′) energy. Each kernel is below its phase."""
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from tost_lm.ops.layout import Layout
from tost_lm.ops.phases import HeadSoftmax, Scoring, Sums
from tost_lm.ops.triton.forward import new_sums
from tost_lm.ops.triton.scan import sums
from tost_lm.ops.triton.tiles import (
    RUN_TIME,
    chunk_and_head,
    head_places,
    inverse_energies,
    launch,
    load_bias,
    load_column,
    load_sum,
    load_sums,
    load_tile,
    output_gradients,
    reverse_cumsum,
    scoring_arguments,
    share_scales,
    softmax_between,
    store_column,
    store_sums,
    store_tile,
    tokens_of_chunk,
)


def output_backward(
    dy_MHD: Tensor, w_MHD: Tensor, layout: Layout, pi_MH: Tensor, weighted_KHD: Tensor, mass_KH: Tensor
) -> tuple[Sums, Sums]:
    """(c′) The gradients of S2 and N."""
    d_weighted_KHD = new_sums(w_MHD, layout)
    d_mass_KH = torch.empty_like(d_weighted_KHD[..., 0])
    launch(
        output_backward_kernel, mass_KH.numel(), w_MHD, layout, dy_MHD, pi_MH, weighted_KHD, mass_KH,
        d_weighted_KHD, d_mass_KH,
    )  # fmt: skip
    return sums(d_weighted_KHD, layout, reverse=True), sums(d_mass_KH, layout, reverse=True)


@triton.jit
def output_backward_kernel(
    w_MHD, start_K, end_K, dy_MHD, pi_MH, weighted_KHD, mass_KH, d_weighted_KHD, d_mass_KH,
    H: tl.constexpr, D: tl.constexpr, D_: tl.constexpr,
):  # fmt: skip
    k, h = chunk_and_head(H)
    start, tokens = tokens_of_chunk(k, start_K, end_K)
    w_TD = load_tile(w_MHD, start, tokens, h, H, D, D_)
    dy_TD = load_tile(dy_MHD, start, tokens, h, H, D, D_)
    pi_T = load_column(pi_MH, start, tokens, h, H)
    weighted_D = load_sums(weighted_KHD, k, h, H, D, D_)
    _, d_weighted_TD, d_mass_TD = output_gradients(dy_TD, w_TD, pi_T, weighted_D, load_sum(mass_KH, k, h, H))
    store_sums(d_weighted_KHD, tl.sum(d_weighted_TD, axis=0), k, h, H, D, D_)
    tl.store(d_mass_KH + k * H + h, tl.sum(tl.sum(d_mass_TD, axis=0), axis=0))


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
    """(b′) The gradients of z, of temp and of S1. With a separate softmax, w is read before and after it."""
    d_energy_KHD = new_sums(w_MHD, layout)
    d_temp_KH = torch.empty_like(d_energy_KHD[..., 0])
    H = w_MHD.shape[1]

    def run(stage: str, heads: int, d_z_MH: Tensor) -> Tensor:
        launch(
            memberships_backward_kernel, mass_KH.numel() // heads, w_MHD, layout,
            dy_MHD, pi_MH, energy_KHD, weighted_KHD, mass_KH, d_weighted_KHD, d_mass_KH,
            d_z_MH, d_temp_KH, d_energy_KHD,
            **scoring_arguments(scoring, w_MHD, layout), STAGE=stage, HEADS=heads,
        )  # fmt: skip
        return d_z_MH

    d_z_MH = torch.empty_like(pi_MH)
    softmax = softmax_between(layout, softmax)
    if softmax is None:
        run("all", H, d_z_MH)
    else:
        d_z_MH = run("scores", 1, softmax.backward(pi_MH, run("memberships", 1, d_z_MH)).contiguous())
    return d_z_MH, d_temp_KH.sum(0), sums(d_energy_KHD, layout, reverse=True)


@triton.jit(do_not_specialize=RUN_TIME)
def memberships_backward_kernel(
    w_MHD, start_K, end_K, dy_MHD, pi_MH, energy_KHD, weighted_KHD, mass_KH, d_weighted_KHD, d_mass_KH,
    d_z_MH, d_temp_KH, d_energy_KHD,
    temp_H, bias_BHT, stride_b, stride_h, stride_t, T, document_K, first_chunk_N1, count_N,
    MEAN: tl.constexpr, BIAS_SCALE: tl.constexpr, STAGE: tl.constexpr, HEADS: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, D_: tl.constexpr, H_: tl.constexpr,
):  # fmt: skip
    """`HEADS` heads of a chunk. `d_z_MH` first holds the gradient of Π, then that of z: stage "memberships" ends before
    the softmax, "scores" starts after it, "all" has all heads and computes both and the softmax."""
    k, first = chunk_and_head(H, HEADS)
    start, tokens = tokens_of_chunk(k, start_K, end_K)
    if STAGE != "scores":
        for h in range(first, first + HEADS):
            w_TD = load_tile(w_MHD, start, tokens, h, H, D, D_)
            dy_TD = load_tile(dy_MHD, start, tokens, h, H, D, D_)
            pi_T = load_column(pi_MH, start, tokens, h, H)
            weighted_D = load_sums(weighted_KHD, k, h, H, D, D_)
            dy_a_TD, d_weighted_TD, d_mass_TD = output_gradients(
                dy_TD, w_TD, pi_T, weighted_D, load_sum(mass_KH, k, h, H)
            )
            d_weighted_TD = load_sums(d_weighted_KHD, k, h, H, D, D_)[None, :] + reverse_cumsum(d_weighted_TD, D_)
            d_pi_TD = (d_weighted_TD * w_TD - dy_a_TD) * w_TD + reverse_cumsum(d_mass_TD, D_)
            d_pi_T = load_sum(d_mass_KH, k, h, H) + tl.sum(d_pi_TD, axis=1)
            store_column(d_z_MH, d_pi_T, start, tokens, h, H)
    if STAGE == "all":
        # Barriers: all of dΠ is stored before a thread loads it, and loaded before a thread stores dz over it.
        tl.debug_barrier()
        places_TH, token_T1, head_1H = head_places(start, tokens, H, H_)
        real_TH = token_T1 & head_1H
        pi_TH = tl.load(pi_MH + places_TH, mask=real_TH, other=0.0)
        d_pi_TH = tl.load(d_z_MH + places_TH, mask=real_TH, other=0.0)
        tl.debug_barrier()
        # Minus dΠ of the largest Π: see HeadSoftmax.backward.
        largest_TH = pi_TH == tl.max(pi_TH, axis=1)[:, None]
        d_pi_TH -= tl.max(tl.where(largest_TH, d_pi_TH, float("-inf")), axis=1)[:, None]
        d_pi_TH -= tl.sum(pi_TH * d_pi_TH, axis=1)[:, None]
        tl.store(d_z_MH + places_TH, pi_TH * d_pi_TH, mask=real_TH)
        tl.debug_barrier()
    if STAGE != "memberships":
        scale_T = share_scales(start, k, start_K, document_K, first_chunk_N1, count_N, D, MEAN)
        for h in range(first, first + HEADS):
            w_TD = load_tile(w_MHD, start, tokens, h, H, D, D_)
            w_sq_TD = w_TD * w_TD
            inverse_TD, fixed_TD = inverse_energies(
                load_sums(energy_KHD, k, h, H, D, D_)[None, :] + tl.cumsum(w_sq_TD, axis=0)
            )
            d_z_T = load_column(d_z_MH, start, tokens, h, H)
            d_shares_TD = (scale_T * d_z_T)[:, None] * (w_sq_TD * inverse_TD)
            d_temp = tl.sum(tl.sum(d_shares_TD, axis=0), axis=0)
            if bias_BHT is not None:
                bias_T = load_bias(start, tokens, h, bias_BHT, T, stride_b, stride_h, stride_t, BIAS_SCALE)
                d_temp += tl.sum(d_z_T * bias_T, axis=0)
            tl.store(d_temp_KH + k * H + h, d_temp)
            d_energy_D = tl.sum(tl.where(fixed_TD, 0.0, d_shares_TD * inverse_TD), axis=0)
            store_sums(d_energy_KHD, -tl.load(temp_H + h) * d_energy_D, k, h, H, D, D_)


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
    dw_MHD = torch.empty_like(w_MHD, memory_format=torch.contiguous_format)
    launch(
        energy_backward_kernel, mass_KH.numel(), w_MHD, layout,
        dy_MHD, pi_MH, d_z_MH, energy_KHD, weighted_KHD, mass_KH, d_energy_KHD, d_weighted_KHD, dw_MHD,
        scoring.temp_H, layout.document_K, layout.first_chunk_N1, scoring.count_N,
        MEAN=scoring.membership == "energy-mean",
        # A fused multiply-add does not round w², so S1 − w² would not be 0 at a document's first token.
        enable_fp_fusion=False,
    )  # fmt: skip
    return dw_MHD


@triton.jit
def energy_backward_kernel(
    w_MHD, start_K, end_K, dy_MHD, pi_MH, d_z_MH, energy_KHD, weighted_KHD, mass_KH, d_energy_KHD, d_weighted_KHD,
    dw_MHD, temp_H, document_K, first_chunk_N1, count_N,
    MEAN: tl.constexpr, H: tl.constexpr, D: tl.constexpr, D_: tl.constexpr,
):  # fmt: skip
    """A token's own term through S1 is combined with that of w²/S1: u·(S1 − w²)/S1². R1 sums later tokens only.

    (u/S1 plus a sum that includes the own term −u·w²/S1² is equal, but cancels near a document's first tokens.) Later
    terms are summed from the next token on, because subtracting the own term from a sum would cancel as well.
    """
    k, h = chunk_and_head(H)
    start, tokens = tokens_of_chunk(k, start_K, end_K)
    w_TD = load_tile(w_MHD, start, tokens, h, H, D, D_)
    dy_TD = load_tile(dy_MHD, start, tokens, h, H, D, D_)
    pi_T = load_column(pi_MH, start, tokens, h, H)
    weighted_D = load_sums(weighted_KHD, k, h, H, D, D_)
    dy_a_TD, d_weighted_TD, _ = output_gradients(dy_TD, w_TD, pi_T, weighted_D, load_sum(mass_KH, k, h, H))
    d_weighted_TD = load_sums(d_weighted_KHD, k, h, H, D, D_)[None, :] + reverse_cumsum(d_weighted_TD, D_)
    d_w_sq_TD = pi_T[:, None] * d_weighted_TD

    temp = tl.load(temp_H + h)
    w_sq_TD = w_TD * w_TD
    energy_TD = load_sums(energy_KHD, k, h, H, D, D_)[None, :] + tl.cumsum(w_sq_TD, axis=0)
    inverse_TD, fixed_TD = inverse_energies(energy_TD)
    scale_T = share_scales(start, k, start_K, document_K, first_chunk_N1, count_N, D, MEAN)
    u_T = temp * scale_T * load_column(d_z_MH, start, tokens, h, H)
    d_w_sq_TD += u_T[:, None] * inverse_TD * tl.where(fixed_TD, 1.0, (energy_TD - w_sq_TD) * inverse_TD)

    w_next_TD = load_tile(w_MHD, start + 1, tokens - 1, h, H, D, D_)
    w_sq_next_TD = w_next_TD * w_next_TD
    inverse_TD, fixed_TD = inverse_energies(energy_TD + w_sq_next_TD)
    scale_T = share_scales(start + 1, k, start_K, document_K, first_chunk_N1, count_N, D, MEAN)
    u_T = temp * scale_T * load_column(d_z_MH, start + 1, tokens - 1, h, H)
    d_energy_TD = tl.where(fixed_TD, 0.0, u_T[:, None] * inverse_TD * (w_sq_next_TD * inverse_TD))
    d_w_sq_TD += load_sums(d_energy_KHD, k, h, H, D, D_)[None, :] - reverse_cumsum(d_energy_TD, D_)

    dw_TD = 2 * w_TD * d_w_sq_TD - dy_a_TD * pi_T[:, None]
    store_tile(dw_MHD, dw_TD, start, tokens, h, H, D, D_)
