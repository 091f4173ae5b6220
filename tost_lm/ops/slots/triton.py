"""Slot memory in Triton, for NVIDIA GPUs: what a chunk adds to M and N, and the read, with closed-form gradients.

A program computes one head of a chunk of 64 tokens in float32. It reads and writes the tokens where they lie, [M, H, X]
with M = B·T, and recomputes N and the shares r/N in the backward. Products are IEEE float32, without tensor cores.

Shapes as in `tost_lm.ops.slots`. Inside a kernel: T tokens of a chunk, always `TOKENS`; S slots and D channels, padded
to powers of two (`S_`, `D_`). Wide heads take `D_` channels at a time. Padding is 0 and adds nothing to any sum.
"""
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIncompatibleMethodOverride=false

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from tost_lm.ops.layout import Layout, document_layout
from tost_lm.ops.naive import running_dtype
from tost_lm.ops.slots.chunks import CHUNK_TOKENS, Chunks
from tost_lm.ops.triton.tiles import MASS_FLOOR, chunk_and_head, tokens_of_chunk

TOKENS = tl.constexpr(CHUNK_TOKENS)
CHANNELS = 64
"""Channels at a time: a tile of them fits in registers."""


class TritonChunks(Chunks):
    """The chunks of the n documents on this rank. Tokens stay where they are: x_MHX instead of x_MHX."""

    def split(self, x_BTHX: Tensor) -> Tensor:
        return x_BTHX.flatten(0, 1).contiguous()

    def join(self, x_MHX: Tensor, rows: Sequence[int]) -> Tensor:
        return x_MHX.unflatten(0, (rows[0], rows[1]))

    def sums(self, write_MHS: Tensor, value_MHD: Tensor, log_decay_H: Tensor) -> Tensor:
        return _Sums.apply(write_MHS, value_MHD, log_decay_H, self._layout(value_MHD.device))

    def read(
        self, read_MHS: Tensor, write_MHS: Tensor, value_MHD: Tensor, before_KHSE: Tensor, log_decay_H: Tensor
    ) -> Tensor:
        layout = self._layout(value_MHD.device)
        return _Read.apply(read_MHS, write_MHS, value_MHD, before_KHSE, log_decay_H, layout)

    def _layout(self, device: torch.device) -> Layout:
        return document_layout((0, *accumulate(self.lengths)), CHUNK_TOKENS, device)


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx, write_MHS: Tensor, value_MHD: Tensor, log_decay_H: Tensor, layout: Layout):
        ctx.save_for_backward(write_MHS, value_MHD, log_decay_H)
        ctx.layout = layout
        shape = len(layout.start_K), *write_MHS.shape[1:], value_MHD.shape[-1] + 1
        sums_KHSE = write_MHS.new_empty(shape, dtype=running_dtype(write_MHS.device))
        _launch(sums_kernel, layout, write_MHS, value_MHD, log_decay_H, sums_KHSE)
        return sums_KHSE

    @staticmethod
    @once_differentiable
    def backward(ctx, d_sums_KHSE: Tensor):
        write_MHS, value_MHD, log_decay_H = ctx.saved_tensors
        d_write_MHS, d_value_MHD = torch.empty_like(write_MHS), torch.empty_like(value_MHD)
        d_log_decay_KH = log_decay_H.new_empty(d_sums_KHSE.shape[:2])
        _launch(
            sums_backward_kernel, ctx.layout, write_MHS, value_MHD, log_decay_H, d_sums_KHSE,
            d_write_MHS, d_value_MHD, d_log_decay_KH,
        )  # fmt: skip
        return d_write_MHS, d_value_MHD, d_log_decay_KH.sum(0), None


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        read_MHS: Tensor,
        write_MHS: Tensor,
        value_MHD: Tensor,
        before_KHSE: Tensor,
        log_decay_H: Tensor,
        layout: Layout,
    ):
        ctx.save_for_backward(read_MHS, write_MHS, value_MHD, before_KHSE, log_decay_H)
        ctx.layout = layout
        y_MHD = torch.empty_like(value_MHD)
        _launch(read_kernel, layout, write_MHS, value_MHD, log_decay_H, read_MHS, before_KHSE, y_MHD)
        return y_MHD

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_MHD: Tensor):
        read_MHS, write_MHS, value_MHD, before_KHSE, log_decay_H = ctx.saved_tensors
        d_inputs = [torch.empty_like(x) for x in (read_MHS, write_MHS, value_MHD, before_KHSE)]
        d_log_decay_KH = log_decay_H.new_empty(before_KHSE.shape[:2])
        _launch(
            read_backward_kernel, ctx.layout, write_MHS, value_MHD, log_decay_H, read_MHS, before_KHSE, dy_MHD,
            *d_inputs, d_log_decay_KH,
        )  # fmt: skip
        return *d_inputs, d_log_decay_KH.sum(0), None


def _launch(kernel: Any, layout: Layout, write_MHS: Tensor, value_MHD: Tensor, *tensors: Tensor) -> None:
    _, H, S = write_MHS.shape
    D = value_MHD.shape[-1]
    S_, D_ = (max(16, triton.next_power_of_2(X)) for X in (S, min(D, CHANNELS)))
    with torch.cuda.device_of(value_MHD):
        kernel[(len(layout.start_K) * H,)](
            *(x.contiguous() for x in (layout.start_K, layout.end_K, write_MHS, value_MHD, *tensors)),
            H=H, S=S, D=D, S_=S_, D_=D_, num_warps=4,
        )  # fmt: skip


@triton.jit
def sums_kernel(
    start_K, end_K, write_MHS, value_MHD, log_decay_H, sums_KHSE,
    H: tl.constexpr, S: tl.constexpr, D: tl.constexpr, S_: tl.constexpr, D_: tl.constexpr,
):  # fmt: skip
    k, h = chunk_and_head(H)
    start, tokens = tokens_of_chunk(k, start_K, end_K)
    token, state = start * H + h, (k * H + h) * S * (D + 1)
    _, fade_T = fade_to_end(tokens, tl.load(log_decay_H + h))
    write_TS = load_tile(write_MHS + token * S, tokens, H * S, 0, S, TOKENS, S_)
    faded_ST = tl.trans(write_TS * fade_T[:, None])
    store_mass(sums_KHSE + state, tl.sum(faded_ST, axis=1), S, D, S_)
    for d in range(0, D, D_):
        value_TD = load_tile(value_MHD + token * D, tokens, H * D, d, D, TOKENS, D_)
        store_tile(sums_KHSE + state, dot(faded_ST, value_TD), S, D + 1, d, D, S_, D_)


@triton.jit
def sums_backward_kernel(
    start_K, end_K, write_MHS, value_MHD, log_decay_H, d_sums_KHSE, d_write_MHS, d_value_MHD, d_log_decay_KH,
    H: tl.constexpr, S: tl.constexpr, D: tl.constexpr, S_: tl.constexpr, D_: tl.constexpr,
):  # fmt: skip
    k, h = chunk_and_head(H)
    start, tokens = tokens_of_chunk(k, start_K, end_K)
    token, state = start * H + h, (k * H + h) * S * (D + 1)
    left_T, fade_T = fade_to_end(tokens, tl.load(log_decay_H + h))
    write_TS = load_tile(write_MHS + token * S, tokens, H * S, 0, S, TOKENS, S_)
    faded_TS = write_TS * fade_T[:, None]
    d_faded_TS = tl.zeros((TOKENS, S_), tl.float32) + load_mass(d_sums_KHSE + state, S, D, S_)[None, :]
    for d in range(0, D, D_):
        value_TD = load_tile(value_MHD + token * D, tokens, H * D, d, D, TOKENS, D_)
        d_memory_SD = load_tile(d_sums_KHSE + state, S, D + 1, d, D, S_, D_)
        d_faded_TS += dot(value_TD, tl.trans(d_memory_SD))
        store_tile(d_value_MHD + token * D, dot(faded_TS, d_memory_SD), tokens, H * D, d, D, TOKENS, D_)
    store_tile(d_write_MHS + token * S, d_faded_TS * fade_T[:, None], tokens, H * S, 0, S, TOKENS, S_)
    tl.store(d_log_decay_KH + k * H + h, tl.sum(left_T * tl.sum(faded_TS * d_faded_TS, axis=1), axis=0))


@triton.jit
def read_kernel(
    start_K, end_K, write_MHS, value_MHD, log_decay_H, read_MHS, before_KHSE, y_MHD,
    H: tl.constexpr, S: tl.constexpr, D: tl.constexpr, S_: tl.constexpr, D_: tl.constexpr,
):  # fmt: skip
    """A product would carry a NaN to earlier tokens, as 0 · NaN. It is cut out, and put into the later tokens of y."""
    k, h = chunk_and_head(H)
    start, tokens = tokens_of_chunk(k, start_K, end_K)
    token, state = start * H + h, (k * H + h) * S * (D + 1)
    read_TS = load_tile(read_MHS + token * S, tokens, H * S, 0, S, TOKENS, S_)
    write_TS, broken_S = finite(load_tile(write_MHS + token * S, tokens, H * S, 0, S, TOKENS, S_))
    _, fade_TT, age_T, fade_T = decay(tl.load(log_decay_H + h))
    inverse_TS = inverse_masses(write_TS, load_mass(before_KHSE + state, S, D, S_), fade_TT, fade_T)
    share_TS = read_TS * inverse_TS
    weight_TT = dot(share_TS, tl.trans(write_TS)) * fade_TT
    share_TS *= fade_T[:, None]
    broken = tl.min(broken_S, axis=0)
    for d in range(0, D, D_):
        value_TD, broken_D = finite(load_tile(value_MHD + token * D, tokens, H * D, d, D, TOKENS, D_))
        memory_SD = load_tile(before_KHSE + state, S, D + 1, d, D, S_, D_)
        y_TD = dot(weight_TT, value_TD) + dot(share_TS, memory_SD)
        y_TD = tl.where(age_T[:, None] > tl.minimum(broken, broken_D)[None, :], float("nan"), y_TD)
        store_tile(y_MHD + token * D, y_TD, tokens, H * D, d, D, TOKENS, D_)


@triton.jit
def read_backward_kernel(
    start_K, end_K, write_MHS, value_MHD, log_decay_H, read_MHS, before_KHSE, dy_MHD,
    d_read_MHS, d_write_MHS, d_value_MHD, d_before_KHSE, d_log_decay_KH,
    H: tl.constexpr, S: tl.constexpr, D: tl.constexpr, S_: tl.constexpr, D_: tl.constexpr,
):  # fmt: skip
    k, h = chunk_and_head(H)
    start, tokens = tokens_of_chunk(k, start_K, end_K)
    token, state = start * H + h, (k * H + h) * S * (D + 1)
    d_weight_TT, read_memory_TS = tl.zeros((TOKENS, TOKENS), tl.float32), tl.zeros((TOKENS, S_), tl.float32)
    for d in range(0, D, D_):
        dy_TD = load_tile(dy_MHD + token * D, tokens, H * D, d, D, TOKENS, D_)
        value_TD, _ = finite(load_tile(value_MHD + token * D, tokens, H * D, d, D, TOKENS, D_))
        memory_SD = load_tile(before_KHSE + state, S, D + 1, d, D, S_, D_)
        d_weight_TT += dot(dy_TD, tl.trans(value_TD))
        read_memory_TS += dot(dy_TD, tl.trans(memory_SD))

    read_TS = load_tile(read_MHS + token * S, tokens, H * S, 0, S, TOKENS, S_)
    write_TS, _ = finite(load_tile(write_MHS + token * S, tokens, H * S, 0, S, TOKENS, S_))
    mass_S = load_mass(before_KHSE + state, S, D, S_)
    age_TT, fade_TT, age_T, fade_T = decay(tl.load(log_decay_H + h))
    inverse_TS = inverse_masses(write_TS, mass_S, fade_TT, fade_T)
    share_TS = read_TS * inverse_TS
    weight_TT = dot(share_TS, tl.trans(write_TS)) * fade_TT
    # Each decay is exp(log ρ · age): its gradient times the decay and the age is that of log ρ.
    d_fade_TT = d_weight_TT * weight_TT
    d_weight_TT *= fade_TT
    d_share_TS = dot(d_weight_TT, write_TS) + fade_T[:, None] * read_memory_TS
    d_mass_TS = -d_share_TS * share_TS * inverse_TS
    d_fade_TT += dot(d_mass_TS, tl.trans(write_TS)) * fade_TT
    d_fade_T = tl.sum(share_TS * read_memory_TS + d_mass_TS * mass_S[None, :], axis=1) * fade_T
    d_log_decay = tl.sum(tl.sum(d_fade_TT * age_TT, axis=1) + d_fade_T * age_T, axis=0)
    tl.store(d_log_decay_KH + k * H + h, d_log_decay)
    store_tile(d_read_MHS + token * S, d_share_TS * inverse_TS, tokens, H * S, 0, S, TOKENS, S_)
    d_write_TS = dot(tl.trans(d_weight_TT), share_TS) + dot(tl.trans(fade_TT), d_mass_TS)
    store_tile(d_write_MHS + token * S, d_write_TS, tokens, H * S, 0, S, TOKENS, S_)
    store_mass(d_before_KHSE + state, tl.sum(d_mass_TS * fade_T[:, None], axis=0), S, D, S_)
    share_TS *= fade_T[:, None]
    for d in range(0, D, D_):
        dy_TD = load_tile(dy_MHD + token * D, tokens, H * D, d, D, TOKENS, D_)
        store_tile(d_value_MHD + token * D, dot(tl.trans(weight_TT), dy_TD), tokens, H * D, d, D, TOKENS, D_)
        store_tile(d_before_KHSE + state, dot(tl.trans(share_TS), dy_TD), S, D + 1, d, D, S_, D_)


@triton.jit
def dot(a_XY, b_YZ):
    return tl.dot(a_XY, b_YZ, input_precision="ieee")


@triton.jit
def fade_to_end(tokens, log_decay):
    """The tokens after each in its chunk, and the decay over them."""
    left_T = tl.maximum(tokens - 1 - tl.arange(0, TOKENS), 0)
    return left_T, tl.exp(log_decay * left_T)


@triton.jit
def decay(log_decay):
    """Age and decay from column to row, and from the chunk's start to each row. The decay of later columns is 0."""
    t_T = tl.arange(0, TOKENS)
    age_TT = t_T[:, None] - t_T[None, :]
    fade_TT = tl.exp(tl.where(age_TT < 0, float("-inf"), log_decay * age_TT))
    return age_TT, fade_TT, t_T + 1, tl.exp(log_decay * (t_T + 1))


@triton.jit
def inverse_masses(write_TS, mass_S, fade_TT, fade_T):
    return 1 / (dot(fade_TT, write_TS) + fade_T[:, None] * mass_S[None, :] + MASS_FLOOR)


@triton.jit
def finite(x_TX):
    """x with 0 for each NaN and infinity, and the first token with one in each column, or `TOKENS`."""
    is_finite_TX = tl.abs(x_TX) < float("inf")
    t_T = tl.arange(0, TOKENS)
    return tl.where(is_finite_TX, x_TX, 0.0), tl.min(tl.where(is_finite_TX, TOKENS, t_T[:, None]), axis=0)


@triton.jit
def tile_places(rows, stride, first, columns, R_: tl.constexpr, X_: tl.constexpr):
    r_R, x_X = tl.arange(0, R_), first + tl.arange(0, X_)
    return r_R[:, None] * stride + x_X[None, :], (r_R < rows)[:, None] & (x_X < columns)[None, :]


@triton.jit
def load_tile(x, rows, stride, first, columns, R_: tl.constexpr, X_: tl.constexpr):
    """`X_` columns from `first` on of a matrix, [R, X], in float32."""
    places_RX, real_RX = tile_places(rows, stride, first, columns, R_, X_)
    return tl.load(x + places_RX, mask=real_RX, other=0.0).to(tl.float32)


@triton.jit
def store_tile(x, x_RX, rows, stride, first, columns, R_: tl.constexpr, X_: tl.constexpr):
    places_RX, real_RX = tile_places(rows, stride, first, columns, R_, X_)
    tl.store(x + places_RX, x_RX.to(x.dtype.element_ty), mask=real_RX)


@triton.jit
def load_mass(state_SE, S: tl.constexpr, D: tl.constexpr, S_: tl.constexpr):
    s_S = tl.arange(0, S_)
    return tl.load(state_SE + s_S * (D + 1) + D, mask=s_S < S, other=0.0).to(tl.float32)


@triton.jit
def store_mass(state_SE, mass_S, S: tl.constexpr, D: tl.constexpr, S_: tl.constexpr):
    s_S = tl.arange(0, S_)
    tl.store(state_SE + s_S * (D + 1) + D, mass_S.to(state_SE.dtype.element_ty), mask=s_S < S)
