"""The forward phases: (a) energy, (b) memberships, (c) output. Each kernel is below its phase."""
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from tost_lm.ops.layout import Layout
from tost_lm.ops.phases import HeadSoftmax, Scoring, Sums
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
    scoring_arguments,
    second_moments,
    share_scales,
    softmax_between,
    store_column,
    store_sums,
    store_tile,
    tokens_of_chunk,
)


def energy(w_MHD: Tensor, layout: Layout) -> Sums:
    """(a) Σ w²."""
    energy_KHD = new_sums(w_MHD, layout)
    launch(energy_kernel, energy_KHD[..., 0].numel(), w_MHD, layout, energy_KHD)
    return sums(energy_KHD, layout)


@triton.jit
def energy_kernel(w_MHD, start_K, end_K, energy_KHD, H: tl.constexpr, D: tl.constexpr, D_: tl.constexpr):
    k, h = chunk_and_head(H)
    start, tokens = tokens_of_chunk(k, start_K, end_K)
    w_TD = load_tile(w_MHD, start, tokens, h, H, D, D_)
    store_sums(energy_KHD, tl.sum(w_TD * w_TD, axis=0), k, h, H, D, D_)


def memberships(
    w_MHD: Tensor, layout: Layout, scoring: Scoring, energy_KHD: Tensor, softmax: HeadSoftmax | None = None
) -> tuple[Tensor, Sums, Sums]:
    """(b) Π, Σ Π·w² and Σ Π. With a separate softmax, w is read before and after it."""
    weighted_KHD = new_sums(w_MHD, layout)
    mass_KH = torch.empty_like(weighted_KHD[..., 0])
    H = w_MHD.shape[1]

    def run(stage: str, heads: int, pi_MH: Tensor) -> Tensor:
        launch(
            memberships_kernel, mass_KH.numel() // heads, w_MHD, layout, energy_KHD, pi_MH, weighted_KHD, mass_KH,
            **scoring_arguments(scoring, w_MHD, layout), STAGE=stage, HEADS=heads,
        )  # fmt: skip
        return pi_MH

    pi_MH = torch.empty(w_MHD.shape[:2], device=w_MHD.device)
    softmax = softmax_between(layout, softmax)
    if softmax is None:
        run("all", H, pi_MH)
    else:
        pi_MH = run("moments", 1, softmax.forward(run("scores", 1, pi_MH)).contiguous())
    return pi_MH, sums(weighted_KHD, layout), sums(mass_KH, layout)


@triton.jit(do_not_specialize=RUN_TIME)
def memberships_kernel(
    w_MHD, start_K, end_K, energy_KHD, pi_MH, weighted_KHD, mass_KH,
    temp_H, bias_BHT, stride_b, stride_h, stride_t, T, document_K, first_chunk_N1, count_N,
    MEAN: tl.constexpr, BIAS_SCALE: tl.constexpr, STAGE: tl.constexpr, HEADS: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, D_: tl.constexpr, H_: tl.constexpr,
):  # fmt: skip
    """`HEADS` heads of a chunk. `pi_MH` first holds z, then Π: stage "scores" ends before the softmax, "moments" starts
    after it, "all" has all heads and computes both and the softmax."""
    k, first = chunk_and_head(H, HEADS)
    start, tokens = tokens_of_chunk(k, start_K, end_K)
    if STAGE != "moments":
        scale_T = share_scales(start, k, start_K, document_K, first_chunk_N1, count_N, D, MEAN)
        for h in range(first, first + HEADS):
            w_TD = load_tile(w_MHD, start, tokens, h, H, D, D_)
            w_sq_TD = w_TD * w_TD
            inverse_TD, _ = inverse_energies(
                load_sums(energy_KHD, k, h, H, D, D_)[None, :] + tl.cumsum(w_sq_TD, axis=0)
            )
            score_T = scale_T * tl.sum(w_sq_TD * inverse_TD, axis=1)
            if bias_BHT is not None:
                score_T += load_bias(start, tokens, h, bias_BHT, T, stride_b, stride_h, stride_t, BIAS_SCALE)
            store_column(pi_MH, tl.load(temp_H + h) * score_T, start, tokens, h, H)
    if STAGE == "all":
        # Barriers: all of z is stored before a thread loads it, and loaded before a thread stores Π over it.
        tl.debug_barrier()
        places_TH, token_T1, head_1H = head_places(start, tokens, H, H_)
        z_TH = tl.load(pi_MH + places_TH, mask=token_T1 & head_1H, other=0.0)
        tl.debug_barrier()
        z_TH = tl.where(head_1H, z_TH, float("-inf"))
        pi_TH = tl.exp(z_TH - tl.max(z_TH, axis=1)[:, None])
        tl.store(pi_MH + places_TH, pi_TH / tl.sum(pi_TH, axis=1)[:, None], mask=token_T1 & head_1H)
        tl.debug_barrier()
    if STAGE != "scores":
        for h in range(first, first + HEADS):
            w_TD = load_tile(w_MHD, start, tokens, h, H, D, D_)
            pi_T = load_column(pi_MH, start, tokens, h, H)
            store_sums(weighted_KHD, tl.sum(pi_T[:, None] * (w_TD * w_TD), axis=0), k, h, H, D, D_)
            tl.store(mass_KH + k * H + h, tl.sum(pi_T, axis=0))


def output(w_MHD: Tensor, layout: Layout, pi_MH: Tensor, weighted_KHD: Tensor, mass_KH: Tensor) -> Tensor:
    """(c) y."""
    y_MHD = torch.empty_like(w_MHD, memory_format=torch.contiguous_format)
    launch(output_kernel, mass_KH.numel(), w_MHD, layout, pi_MH, weighted_KHD, mass_KH, y_MHD)
    return y_MHD


@triton.jit
def output_kernel(
    w_MHD, start_K, end_K, pi_MH, weighted_KHD, mass_KH, y_MHD,
    H: tl.constexpr, D: tl.constexpr, D_: tl.constexpr,
):  # fmt: skip
    k, h = chunk_and_head(H)
    start, tokens = tokens_of_chunk(k, start_K, end_K)
    w_TD = load_tile(w_MHD, start, tokens, h, H, D, D_)
    pi_T = load_column(pi_MH, start, tokens, h, H)
    weighted_D = load_sums(weighted_KHD, k, h, H, D, D_)
    _, mass_T, inverse_TD = second_moments(w_TD, pi_T, weighted_D, load_sum(mass_KH, k, h, H))
    store_tile(y_MHD, -w_TD * ((pi_T * mass_T)[:, None] * inverse_TD), start, tokens, h, H, D, D_)


def new_sums(w_MHD: Tensor, layout: Layout) -> Tensor:
    return torch.empty(len(layout.start_K), *w_MHD.shape[1:], device=w_MHD.device)
