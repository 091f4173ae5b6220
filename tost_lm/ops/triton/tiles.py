"""Common code of the kernels: the launch shape, loads and stores of a tile (one chunk of one head), and formulas.

Shapes inside a kernel: T tokens of a chunk, always `TOKENS`; D channels of a head and H heads, padded to powers of two
(`D_`, `H_`). Padding has w = 0, dy = 0 and Π = 0, and adds nothing to any sum. Sums over tokens are scans, which add to
later tokens only: a NaN never reaches an earlier token, as it would in a product with a triangular matrix.
"""
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tost_lm.ops import naive
from tost_lm.ops.layout import Layout
from tost_lm.ops.phases import HeadSoftmax, LocalSoftmax, Scoring
from tost_lm.sizes import TRITON_CHUNK_TOKENS

ENERGY_FLOOR = tl.constexpr(naive.ENERGY_FLOOR)
MASS_FLOOR = tl.constexpr(naive.MASS_FLOOR)
TOKENS = tl.constexpr(TRITON_CHUNK_TOKENS)
TOKEN_BITS = tl.constexpr(TRITON_CHUNK_TOKENS.bit_length() - 1)


def chunk_tokens(heads: int, channels: int, device: torch.device) -> int:
    """Tokens of a chunk for any D: one thread holds those of a channel in registers, and more would not fit."""
    return TOKENS.value


def launch(kernel: Any, programs: int, w_MHD: Tensor, layout: Layout, *tensors: Tensor, **arguments: Any) -> None:
    """Run `kernel` on w, the chunk boundaries, `tensors` (made contiguous) and `arguments` (passed unchanged).

    The launch shape depends on D alone: one thread for each channel. Nothing is tuned or compiled for a length.
    """
    _, H, D = w_MHD.shape
    D_ = max(32, triton.next_power_of_2(D))
    with torch.cuda.device_of(w_MHD):
        kernel[(programs,)](
            *(x.contiguous() for x in (w_MHD, layout.start_K, layout.end_K, *tensors)),
            **arguments,
            H=H,
            D=D,
            D_=D_,
            num_warps=D_ // 32,
        )


def scoring_arguments(scoring: Scoring, w_MHD: Tensor, layout: Layout) -> dict[str, Any]:
    """The additional arguments of kernels that compute scores."""
    bias_BHT = scoring.bias_BHT
    bias_strides = (0, 0, 0) if bias_BHT is None else bias_BHT.stride()
    return {
        "temp_H": scoring.temp_H.contiguous(),
        "bias_BHT": bias_BHT,
        **dict(zip(("stride_b", "stride_h", "stride_t"), bias_strides, strict=True)),
        "T": 1 if bias_BHT is None else bias_BHT.shape[2],
        "document_K": layout.document_K,
        "first_chunk_N1": layout.first_chunk_N1,
        "count_N": scoring.count_N,
        "MEAN": scoring.membership == "energy-mean",
        "BIAS_SCALE": scoring.bias_scale(w_MHD.shape[2]),
        "H_": triton.next_power_of_2(w_MHD.shape[1]),
    }


RUN_TIME = ["T", "stride_b", "stride_h", "stride_t"]
"""Integer arguments that must not cause a recompilation."""

FEW_CHUNKS = 1024
"""With fewer programs, a large GPU is partly idle."""


def softmax_between(layout: Layout, softmax: HeadSoftmax | None) -> HeadSoftmax | None:
    """The softmax to call between two kernels with a program for each head; None: one kernel that loops over the heads.

    One kernel needs many chunks to fill a GPU; its second read of w comes from the cache. With few chunks, the second
    read of two kernels comes from the cache as well.
    """
    return LocalSoftmax() if softmax is None and len(layout.start_K) < FEW_CHUNKS else softmax


@triton.jit
def chunk_and_head(H: tl.constexpr, HEADS: tl.constexpr = 1):
    """This program's chunk and the first of its `HEADS` heads, int64. Consecutive programs have the heads of one chunk,
    so together they read whole tokens."""
    program = tl.program_id(0).to(tl.int64)
    return program // (H // HEADS), program % (H // HEADS) * HEADS


@triton.jit
def tokens_of_chunk(k, start_K, end_K):
    """The chunk's first token, int64, and its number of tokens."""
    start = tl.load(start_K + k)
    return start, (tl.load(end_K + k) - start).to(tl.int32)


@triton.jit
def tile_places(tokens, H: tl.constexpr, D: tl.constexpr, D_: tl.constexpr):
    """[T, D]: the offsets of a head's channels from its first, and which are no padding.

    `multiple_of` hides from the compiler that the channels start at a multiple of their number, so that each thread
    holds all tokens of one channel instead of some tokens of several. Scans and sums over tokens are then plain
    additions in registers, without shuffles. Neighbouring threads still read neighbouring addresses.
    """
    t_T, d_D = tl.arange(0, TOKENS), tl.multiple_of(tl.arange(0, D_), 1)
    return t_T[:, None] * (H * D) + d_D[None, :], (t_T < tokens)[:, None] & (d_D < D)[None, :]


@triton.jit
def load_tile(x_MHD, start, tokens, h, H: tl.constexpr, D: tl.constexpr, D_: tl.constexpr):
    """One head of `tokens` tokens from `start` on, in float32."""
    places_TD, real_TD = tile_places(tokens, H, D, D_)
    return tl.load(x_MHD + (start * H + h) * D + places_TD, mask=real_TD, other=0.0).to(tl.float32)


@triton.jit
def store_tile(x_MHD, x_TD, start, tokens, h, H: tl.constexpr, D: tl.constexpr, D_: tl.constexpr):
    places_TD, real_TD = tile_places(tokens, H, D, D_)
    tl.store(x_MHD + (start * H + h) * D + places_TD, x_TD.to(x_MHD.dtype.element_ty), mask=real_TD)


@triton.jit
def load_column(x_MH, start, tokens, h, H: tl.constexpr):
    t_T = tl.arange(0, TOKENS)
    return tl.load(x_MH + start * H + h + t_T * H, mask=t_T < tokens, other=0.0)


@triton.jit
def store_column(x_MH, x_T, start, tokens, h, H: tl.constexpr):
    t_T = tl.arange(0, TOKENS)
    tl.store(x_MH + start * H + h + t_T * H, x_T, mask=t_T < tokens)


@triton.jit
def load_sums(x_KHD, k, h, H: tl.constexpr, D: tl.constexpr, D_: tl.constexpr):
    d_D = tl.arange(0, D_)
    return tl.load(x_KHD + (k * H + h) * D + d_D, mask=d_D < D, other=0.0).to(tl.float32)


@triton.jit
def load_sum(x_KH, k, h, H: tl.constexpr):
    return tl.load(x_KH + k * H + h).to(tl.float32)


@triton.jit
def store_sums(x_KHD, x_D, k, h, H: tl.constexpr, D: tl.constexpr, D_: tl.constexpr):
    d_D = tl.arange(0, D_)
    tl.store(x_KHD + (k * H + h) * D + d_D, x_D, mask=d_D < D)


@triton.jit
def head_places(start, tokens, H: tl.constexpr, H_: tl.constexpr):
    """[T, H]: the offsets of a chunk's tokens and heads in [M, H], and which are no padding."""
    t_T, h_H = tl.arange(0, TOKENS), tl.arange(0, H_)
    return start * H + t_T[:, None] * H + h_H[None, :], (t_T < tokens)[:, None], (h_H < H)[None, :]


@triton.jit
def reverse_cumsum(x_TD, D_: tl.constexpr):
    """Sums from each token to the chunk's last.

    Triton's own reverse scan reverses the tile with ten shuffles for each element. Splitting and joining compile to
    renamed registers here, which cost nothing.
    """
    return turned(tl.cumsum(turned(x_TD, D_), axis=0), D_)


@triton.jit
def turned(x_TD, D_: tl.constexpr):
    """The tokens in reverse order: each bit of their index is flipped."""
    for i in tl.static_range(TOKEN_BITS):
        x_ABD2 = tl.permute(tl.reshape(x_TD, (TOKENS >> (i + 1), 2, 1 << i, D_)), (0, 2, 3, 1))
        clear_ABD, set_ABD = tl.split(x_ABD2)
        x_TD = tl.reshape(tl.permute(tl.join(set_ABD, clear_ABD), (0, 3, 1, 2)), (TOKENS, D_))
    return x_TD


@triton.jit
def share_scales(start, k, start_K, document_K, first_chunk_N1, count_N, D: tl.constexpr, MEAN: tl.constexpr):
    """The factor of Σ_d w²/S1 in the score: tokens so far / D under `energy-mean`, else 1."""
    if MEAN:
        n = tl.load(document_K + k)
        document_start = tl.load(start_K + tl.load(first_chunk_N1 + n))
        count = (tl.load(count_N + n) + start - document_start + 1).to(tl.float32)
        scale_T = (count + tl.arange(0, TOKENS)) / D
    else:
        scale_T = tl.full((TOKENS,), 1.0, tl.float32)
    return scale_T


@triton.jit
def inverse_energies(energy_TD):
    """1/S1 with S1 at least the floor, and where the floor replaces S1. A NaN stays NaN."""
    fixed_TD = energy_TD < ENERGY_FLOOR
    return 1 / tl.where(fixed_TD, ENERGY_FLOOR, energy_TD), fixed_TD


@triton.jit
def load_bias(start, tokens, h, bias_BHT, T, stride_b, stride_h, stride_t, BIAS_SCALE: tl.constexpr):
    """The bias in z/temp."""
    t_T = tl.arange(0, TOKENS)
    places_T = start // T * stride_b + h * stride_h + (start % T + t_T) * stride_t  # a chunk lies in one sequence
    return tl.load(bias_BHT + places_T, mask=t_T < tokens, other=0.0).to(tl.float32) * BIAS_SCALE


@triton.jit
def second_moments(w_TD, pi_T, weighted_D, mass):
    """S2, N′ = N + floor, and 1/(N′ + S2), all including the token itself."""
    weighted_TD = weighted_D[None, :] + tl.cumsum(pi_T[:, None] * (w_TD * w_TD), axis=0)
    mass_T = mass + tl.cumsum(pi_T, axis=0) + MASS_FLOOR
    return weighted_TD, mass_T, 1 / (mass_T[:, None] + weighted_TD)


@triton.jit
def output_gradients(dy_TD, w_TD, pi_T, weighted_D, mass):
    """dy·a with a = 1/(1 + S2/N′), and each token's terms of the gradients of S2 and (for each channel) of N."""
    weighted_TD, mass_T, inverse_TD = second_moments(w_TD, pi_T, weighted_D, mass)
    dy_a_TD = dy_TD * (mass_T[:, None] * inverse_TD)
    d_weighted_TD = dy_a_TD * (w_TD * inverse_TD) * pi_T[:, None]
    return dy_a_TD, d_weighted_TD, -d_weighted_TD * weighted_TD * (1 / mass_T)[:, None]
