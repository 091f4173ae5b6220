"""The kernels of bidirectional TSSA in Triton, for NVIDIA GPUs; see `tost_lm.mixers.tssa.bidirectional.Kernels`.

A program computes some heads of a chunk of 32 tokens, one token after another, given statistics of the chunk's
document. Sums over documents are sums over chunks (`scan.py`). Device memory traffic of each token, with C = H·D
channels of e bytes, without sums and statistics of chunks: 5·eC forward (w four times, y) and 8·eC backward.
"""
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tost_lm.mixers.tssa.triton import forward
from tost_lm.mixers.tssa.triton.forward import new_sums
from tost_lm.mixers.tssa.triton.tiles import STEP, heads_of_group, launch, load_sums, sums
from tost_lm.mixers.tssa.triton.tiles import chunk_tokens as chunk_tokens
from tost_lm.ops.layout import Layout
from tost_lm.ops.triton_tokens import INTERPRETED, chunk_and_part, load_token, store_token, tokens_of_chunk


def energy(w_MHD: Tensor, layout: Layout) -> Tensor:
    return forward.energy(w_MHD, layout).document


def scores(w_MHD: Tensor, layout: Layout, energy_NHD: Tensor, temp_H: Tensor) -> Tensor:
    z_MH = _new_scores(w_MHD)
    _launch(scores_kernel, w_MHD, layout, energy_NHD, temp_H, z_MH)
    return z_MH


@triton.jit
def scores_kernel(
    w_MHD, start_K, end_K, document_K, energy_NHD, temp_H, z_MH,
    H: tl.constexpr, D: tl.constexpr, G_: tl.constexpr, D_: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    _k, start, tokens, n, h_G, real_G, d_GD, real_GD = place(start_K, end_K, document_K, H, D, G_, D_)
    limit = None if FULL else tokens
    w_TGD, z_TG = w_MHD + start * H * D + d_GD, z_MH + start * H + h_G
    inverse_GD = 1 / tl.load(energy_NHD + n * (H * D) + d_GD, mask=real_GD, other=1.0)
    temp_G = load_sums(temp_H + h_G, real_G)
    for i in range(0, tokens, STEP):
        for j in tl.static_range(STEP):
            w_GD = load_token(w_TGD, i, j, limit, real_GD, H * D)
            store_token(z_TG, temp_G * tl.sum(w_GD * w_GD * inverse_GD, axis=1), i, j, limit, real_G, H)


def weighted_shares(w_MHD: Tensor, layout: Layout, energy_NHD: Tensor, x_MH: Tensor) -> tuple[Tensor, Tensor]:
    sum_KHD = new_sums(w_MHD, layout)
    sum_KH = torch.empty_like(sum_KHD[..., 0])
    _launch(weighted_shares_kernel, w_MHD, layout, energy_NHD, x_MH, sum_KHD, sum_KH)
    return sums(sum_KHD, layout).document, sums(sum_KH, layout).document


@triton.jit
def weighted_shares_kernel(
    w_MHD, start_K, end_K, document_K, energy_NHD, x_MH, sum_KHD, sum_KH,
    H: tl.constexpr, D: tl.constexpr, G_: tl.constexpr, D_: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    k, start, tokens, n, h_G, real_G, d_GD, real_GD = place(start_K, end_K, document_K, H, D, G_, D_)
    limit = None if FULL else tokens
    w_TGD, x_TG = w_MHD + start * H * D + d_GD, x_MH + start * H + h_G
    energy_GD = tl.load(energy_NHD + n * (H * D) + d_GD, mask=real_GD, other=1.0)
    inverse_GD = 1 / energy_GD
    sum_GD, sum_G = tl.zeros((G_, D_), tl.float32), tl.zeros((G_,), tl.float32)
    for i in range(0, tokens, STEP):
        for j in tl.static_range(STEP):
            w_GD = load_token(w_TGD, i, j, limit, real_GD, H * D)
            x_G = load_token(x_TG, i, j, limit, real_G, H)
            sum_GD += x_G[:, None] * quotient(w_GD * w_GD, energy_GD, inverse_GD)
            sum_G += x_G
    tl.store(sum_KHD + k * (H * D) + d_GD, sum_GD, mask=real_GD)
    tl.store(sum_KH + k * H + h_G, sum_G, mask=real_G)


@triton.jit
def quotient(x, y, inverse):
    """x / y, given about 1 / y; exactly 1 where x = y."""
    if INTERPRETED:
        found = x / y
    else:
        guess = x * inverse
        found = tl.fma(tl.fma(-guess, y, x), inverse, guess)
    return found


def output(w_MHD: Tensor, layout: Layout, pi_MH: Tensor, moment_NHD: Tensor) -> Tensor:
    y_MHD = torch.empty_like(w_MHD)
    _launch(output_kernel, w_MHD, layout, pi_MH, moment_NHD, y_MHD)
    return y_MHD


@triton.jit
def output_kernel(
    w_MHD, start_K, end_K, document_K, pi_MH, moment_NHD, y_MHD,
    H: tl.constexpr, D: tl.constexpr, G_: tl.constexpr, D_: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    _k, start, tokens, n, h_G, real_G, d_GD, real_GD = place(start_K, end_K, document_K, H, D, G_, D_)
    limit = None if FULL else tokens
    w_TGD, y_TGD, pi_TG = w_MHD + start * H * D + d_GD, y_MHD + start * H * D + d_GD, pi_MH + start * H + h_G
    factor_GD = -1 / (1 + load_sums(moment_NHD + n * (H * D) + d_GD, real_GD))
    for i in range(0, tokens, STEP):
        for j in tl.static_range(STEP):
            w_GD = load_token(w_TGD, i, j, limit, real_GD, H * D)
            pi_G = load_token(pi_TG, i, j, limit, real_G, H)
            store_token(y_TGD, w_GD * pi_G[:, None] * factor_GD, i, j, limit, real_GD, H * D)


def output_backward(dy_MHD: Tensor, w_MHD: Tensor, layout: Layout, pi_MH: Tensor) -> Tensor:
    sum_KHD = new_sums(w_MHD, layout)
    _launch(output_backward_kernel, w_MHD, layout, dy_MHD, pi_MH, sum_KHD)
    return sums(sum_KHD, layout).document


@triton.jit
def output_backward_kernel(
    w_MHD, start_K, end_K, document_K, dy_MHD, pi_MH, sum_KHD,
    H: tl.constexpr, D: tl.constexpr, G_: tl.constexpr, D_: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    k, start, tokens, _n, h_G, real_G, d_GD, real_GD = place(start_K, end_K, document_K, H, D, G_, D_)
    limit = None if FULL else tokens
    w_TGD, dy_TGD, pi_TG = w_MHD + start * H * D + d_GD, dy_MHD + start * H * D + d_GD, pi_MH + start * H + h_G
    sum_GD = tl.zeros((G_, D_), tl.float32)
    for i in range(0, tokens, STEP):
        for j in tl.static_range(STEP):
            w_GD = load_token(w_TGD, i, j, limit, real_GD, H * D)
            dy_GD = load_token(dy_TGD, i, j, limit, real_GD, H * D)
            sum_GD += dy_GD * w_GD * load_token(pi_TG, i, j, limit, real_G, H)[:, None]
    tl.store(sum_KHD + k * (H * D) + d_GD, sum_GD, mask=real_GD)


def memberships_backward(
    dy_MHD: Tensor, w_MHD: Tensor, layout: Layout, moment_NHD: Tensor, d_weighted_NHD: Tensor, d_mass_NH: Tensor
) -> Tensor:
    d_pi_MH = _new_scores(w_MHD)
    _launch(memberships_backward_kernel, w_MHD, layout, dy_MHD, moment_NHD, d_weighted_NHD, d_mass_NH, d_pi_MH)
    return d_pi_MH


@triton.jit
def memberships_backward_kernel(
    w_MHD, start_K, end_K, document_K, dy_MHD, moment_NHD, d_weighted_NHD, d_mass_NH, d_pi_MH,
    H: tl.constexpr, D: tl.constexpr, G_: tl.constexpr, D_: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    _k, start, tokens, n, h_G, real_G, d_GD, real_GD = place(start_K, end_K, document_K, H, D, G_, D_)
    limit = None if FULL else tokens
    w_TGD, dy_TGD, d_pi_TG = w_MHD + start * H * D + d_GD, dy_MHD + start * H * D + d_GD, d_pi_MH + start * H + h_G
    factor_GD = -1 / (1 + load_sums(moment_NHD + n * (H * D) + d_GD, real_GD))
    d_weighted_GD = load_sums(d_weighted_NHD + n * (H * D) + d_GD, real_GD)
    d_mass_G = load_sums(d_mass_NH + n * H + h_G, real_G)
    for i in range(0, tokens, STEP):
        for j in tl.static_range(STEP):
            w_GD = load_token(w_TGD, i, j, limit, real_GD, H * D)
            dy_GD = load_token(dy_TGD, i, j, limit, real_GD, H * D)
            d_pi_G = tl.sum(w_GD * (w_GD * d_weighted_GD + dy_GD * factor_GD), axis=1) + d_mass_G
            store_token(d_pi_TG, d_pi_G, i, j, limit, real_G, H)


def token_gradient(
    dy_MHD: Tensor, w_MHD: Tensor, layout: Layout, pi_MH: Tensor, d_z_MH: Tensor, moment_NHD: Tensor,
    d_weighted_NHD: Tensor, mean_d_z_NHD: Tensor, scale_NHD: Tensor,
) -> Tensor:  # fmt: skip
    dw_MHD = torch.empty_like(w_MHD)
    _launch(
        token_gradient_kernel, w_MHD, layout,
        dy_MHD, pi_MH, d_z_MH, moment_NHD, d_weighted_NHD, mean_d_z_NHD, scale_NHD, dw_MHD,
    )  # fmt: skip
    return dw_MHD


@triton.jit
def token_gradient_kernel(
    w_MHD, start_K, end_K, document_K,
    dy_MHD, pi_MH, d_z_MH, moment_NHD, d_weighted_NHD, mean_d_z_NHD, scale_NHD, dw_MHD,
    H: tl.constexpr, D: tl.constexpr, G_: tl.constexpr, D_: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    _k, start, tokens, n, h_G, real_G, d_GD, real_GD = place(start_K, end_K, document_K, H, D, G_, D_)
    limit = None if FULL else tokens
    w_TGD, dy_TGD, dw_TGD = w_MHD + start * H * D + d_GD, dy_MHD + start * H * D + d_GD, dw_MHD + start * H * D + d_GD
    pi_TG, d_z_TG = pi_MH + start * H + h_G, d_z_MH + start * H + h_G
    factor_GD = -1 / (1 + load_sums(moment_NHD + n * (H * D) + d_GD, real_GD))
    d_weighted_GD = 2 * load_sums(d_weighted_NHD + n * (H * D) + d_GD, real_GD)
    mean_d_z_GD = load_sums(mean_d_z_NHD + n * (H * D) + d_GD, real_GD)
    scale_GD = load_sums(scale_NHD + n * (H * D) + d_GD, real_GD)
    for i in range(0, tokens, STEP):
        for j in tl.static_range(STEP):
            w_GD = load_token(w_TGD, i, j, limit, real_GD, H * D)
            dy_GD = load_token(dy_TGD, i, j, limit, real_GD, H * D)
            pi_G1 = load_token(pi_TG, i, j, limit, real_G, H)[:, None]
            d_z_G1 = load_token(d_z_TG, i, j, limit, real_G, H)[:, None]
            dw_GD = w_GD * (pi_G1 * d_weighted_GD + (d_z_G1 - mean_d_z_GD) * scale_GD) + dy_GD * pi_G1 * factor_GD
            store_token(dw_TGD, dw_GD, i, j, limit, real_GD, H * D)


@triton.jit
def place(
    start_K, end_K, document_K, H: tl.constexpr, D: tl.constexpr, G_: tl.constexpr, D_: tl.constexpr
):  # fmt: skip
    """This program's chunk, its first token, tokens and document, then `heads_of_group` of the program's group."""
    k, g = chunk_and_part(tl.cdiv(H, G_))
    start, tokens = tokens_of_chunk(k, start_K, end_K)
    h_G, real_G, d_GD, real_GD = heads_of_group(g, H, D, G_, D_)
    return k, start, tokens, tl.load(document_K + k), h_G, real_G, d_GD, real_GD


def _launch(kernel: Any, w_MHD: Tensor, layout: Layout, *tensors: Tensor) -> None:
    launch(kernel, w_MHD, layout, layout.document_K, *tensors, channels=4)


def _new_scores(w_MHD: Tensor) -> Tensor:
    return torch.empty(w_MHD.shape[:2], device=w_MHD.device)
