"""Slot memory in Triton, for NVIDIA GPUs: what a chunk adds to M and N, the scan over chunks, and the read, with
closed-form gradients.

A program computes one head of a chunk of 64 tokens in float32. It reads and writes the tokens where they lie, [M, H, X]
with M = B·T, and recomputes N and the shares r/N in the backward. Products are IEEE float32, without tensor cores. The
scan is float64.

Shapes as in `tost_lm.ops.slots`; K chunks. Inside a kernel: T tokens of a chunk, always `TOKENS`; S slots and D
channels, padded to powers of two (`S_`, `D_`). Wide heads take `D_` channels at a time. Padding is 0 and adds nothing
to any sum.
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
from tost_lm.ops.triton.tiles import MASS_FLOOR, chunk_and_part, tokens_of_chunk
from tost_lm.sizes import TRITON_SLOT_CHUNK_TOKENS

TOKENS = tl.constexpr(TRITON_SLOT_CHUNK_TOKENS)
BLOCK = tl.constexpr(16)
"""Written tokens at a time. A thread holds whole rows of both factors of a product, so longer sums would spill."""
CHANNELS = 32
"""Channels at a time, for the same reason."""
ELEMENTS = tl.constexpr(128)
"""Elements of a head's M and N that a program scans over the chunks, one in each thread."""


def slot_memory_chunks(
    read_MHS: Tensor, write_MHS: Tensor, value_MHD: Tensor, initial_nHSE: Tensor, log_decay_H: Tensor,
    lengths: Sequence[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y [M, H, D], and M and N after each document, [n, H, S, E], from those before it."""
    read, write, value = (x.float().contiguous() for x in (read_MHS, write_MHS, value_MHD))
    layout = _layout(lengths, value)
    before_KHSE, final_nHSE = _Scan.apply(
        _Sums.apply(write, value, log_decay_H, layout), initial_nHSE, log_decay_H, layout
    )
    return _Read.apply(read, write, value, before_KHSE, log_decay_H, layout).to(value_MHD.dtype), final_nHSE


def final_state(
    write_MHS: Tensor, value_MHD: Tensor, initial_nHSE: Tensor, log_decay_H: Tensor, lengths: Sequence[int]
) -> Tensor:
    """M and N after each document, without the reads."""
    write, value = (x.float().contiguous() for x in (write_MHS, value_MHD))
    layout = _layout(lengths, value)
    return _Scan.apply(_Sums.apply(write, value, log_decay_H, layout), initial_nHSE, log_decay_H, layout)[1]


def _layout(lengths: Sequence[int], like: Tensor) -> Layout:
    return document_layout((0, *accumulate(lengths)), TOKENS.value, like.device)


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


class _Scan(torch.autograd.Function):
    """M and N before each chunk, float32, and after each document."""

    @staticmethod
    def forward(ctx, sums_KHSE: Tensor, initial_nHSE: Tensor, log_decay_H: Tensor, layout: Layout):
        before_KHSE = torch.empty_like(sums_KHSE, dtype=torch.float32)
        initial_nHSE = initial_nHSE.contiguous()  # empty_like keeps strides
        final_nHSE = torch.empty_like(initial_nHSE)
        _launch_scan(scan_kernel, layout, log_decay_H, sums_KHSE, initial_nHSE, before_KHSE, final_nHSE)
        ctx.save_for_backward(before_KHSE, log_decay_H)
        ctx.layout = layout
        return before_KHSE, final_nHSE

    @staticmethod
    @once_differentiable
    def backward(ctx, d_before_KHSE: Tensor, d_final_nHSE: Tensor):
        before_KHSE, log_decay_H = ctx.saved_tensors
        d_sums_KHSE = torch.empty_like(before_KHSE, dtype=d_final_nHSE.dtype)
        d_final_nHSE = d_final_nHSE.contiguous()  # empty_like keeps strides
        d_initial_nHSE, d_log_decay_nHSE = torch.empty_like(d_final_nHSE), torch.empty_like(d_final_nHSE)
        _launch_scan(
            scan_backward_kernel, ctx.layout, log_decay_H, before_KHSE, d_before_KHSE, d_final_nHSE,
            d_sums_KHSE, d_initial_nHSE, d_log_decay_nHSE,
        )  # fmt: skip
        return d_sums_KHSE, d_initial_nHSE, d_log_decay_nHSE.sum((0, 2, 3)).to(log_decay_H.dtype), None


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
            H=H, S=S, D=D, S_=S_, D_=D_, num_warps=8, num_stages=1,
        )  # fmt: skip


def _launch_scan(kernel: Any, layout: Layout, log_decay_H: Tensor, *tensors: Tensor) -> None:
    H, X = len(log_decay_H), tensors[0][0, 0].numel()
    with torch.cuda.device_of(log_decay_H):
        kernel[(layout.documents * H * triton.cdiv(X, ELEMENTS.value),)](
            *(x.contiguous() for x in (layout.start_K, layout.end_K, layout.first_chunk_N1, log_decay_H, *tensors)),
            H=H, X=X, num_warps=ELEMENTS.value // 32,
        )  # fmt: skip


@triton.jit
def sums_kernel(
    start_K, end_K, write_MHS, value_MHD, log_decay_H, sums_KHSE,
    H: tl.constexpr, S: tl.constexpr, D: tl.constexpr, S_: tl.constexpr, D_: tl.constexpr,
):  # fmt: skip
    k, h = chunk_and_part(H)
    start, tokens = tokens_of_chunk(k, start_K, end_K)
    token, state = start * H + h, (k * H + h) * S * (D + 1)
    log_decay = tl.load(log_decay_H + h)
    fade_T = fade_to_end(tokens, log_decay, TOKENS)[1]
    write_TS = load_tile(write_MHS + token * S, tokens, H * S, 0, S, TOKENS, S_)
    store_mass(sums_KHSE + state, tl.sum(write_TS * fade_T[:, None], axis=0), S, D, S_)
    for d in range(0, D, D_):
        memory_SD = tl.zeros((S_, D_), tl.float32)
        for j in range(0, TOKENS, BLOCK):
            fade_J = fade_to_end(tokens - j, log_decay, BLOCK)[1]
            write_JS = load_block(write_MHS + token * S, j, tokens, H, 0, S, S_)
            value_JD = load_block(value_MHD + token * D, j, tokens, H, d, D, D_)
            memory_SD += dot(tl.trans(write_JS * fade_J[:, None]), value_JD)
        store_tile(sums_KHSE + state, memory_SD, S, D + 1, d, D, S_, D_)


@triton.jit
def sums_backward_kernel(
    start_K, end_K, write_MHS, value_MHD, log_decay_H, d_sums_KHSE, d_write_MHS, d_value_MHD, d_log_decay_KH,
    H: tl.constexpr, S: tl.constexpr, D: tl.constexpr, S_: tl.constexpr, D_: tl.constexpr,
):  # fmt: skip
    k, h = chunk_and_part(H)
    start, tokens = tokens_of_chunk(k, start_K, end_K)
    token, state = start * H + h, (k * H + h) * S * (D + 1)
    left_T, fade_T = fade_to_end(tokens, tl.load(log_decay_H + h), TOKENS)
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
def scan_kernel(
    start_K, end_K, first_chunk_N1, log_decay_H, sums_KHX, initial_nHX, before_KHX, final_nHX,
    H: tl.constexpr, X: tl.constexpr,
):  # fmt: skip
    n, h, x_X, real_X = elements_of_state(H, X)
    log_decay = tl.load(log_decay_H + h).to(tl.float64)
    state_X = tl.load(initial_nHX + (n * H + h) * X + x_X, mask=real_X, other=0.0)
    for k in range(tl.load(first_chunk_N1 + n), tl.load(first_chunk_N1 + n + 1)):
        _, tokens = tokens_of_chunk(k, start_K, end_K)
        places_X = (k * H + h) * X + x_X
        tl.store(before_KHX + places_X, state_X.to(tl.float32), mask=real_X)
        state_X = tl.exp(log_decay * tokens) * state_X + tl.load(sums_KHX + places_X, mask=real_X, other=0.0)
    tl.store(final_nHX + (n * H + h) * X + x_X, state_X, mask=real_X)


@triton.jit
def scan_backward_kernel(
    start_K, end_K, first_chunk_N1, log_decay_H, before_KHX, d_before_KHX, d_final_nHX,
    d_sums_KHX, d_initial_nHX, d_log_decay_nHX,
    H: tl.constexpr, X: tl.constexpr,
):  # fmt: skip
    n, h, x_X, real_X = elements_of_state(H, X)
    log_decay = tl.load(log_decay_H + h).to(tl.float64)
    first, end = tl.load(first_chunk_N1 + n), tl.load(first_chunk_N1 + n + 1)
    d_state_X = tl.load(d_final_nHX + (n * H + h) * X + x_X, mask=real_X, other=0.0)
    d_log_decay_X = tl.zeros((ELEMENTS,), tl.float64)
    for i in range(end - first):
        k = end - 1 - i
        _, tokens = tokens_of_chunk(k, start_K, end_K)
        places_X = (k * H + h) * X + x_X
        tl.store(d_sums_KHX + places_X, d_state_X, mask=real_X)
        faded_X = tl.exp(log_decay * tokens) * d_state_X
        d_log_decay_X += tokens * faded_X * tl.load(before_KHX + places_X, mask=real_X, other=0.0)
        d_state_X = faded_X + tl.load(d_before_KHX + places_X, mask=real_X, other=0.0)
    tl.store(d_initial_nHX + (n * H + h) * X + x_X, d_state_X, mask=real_X)
    tl.store(d_log_decay_nHX + (n * H + h) * X + x_X, d_log_decay_X, mask=real_X)


@triton.jit
def read_kernel(
    start_K, end_K, write_MHS, value_MHD, log_decay_H, read_MHS, before_KHSE, y_MHD,
    H: tl.constexpr, S: tl.constexpr, D: tl.constexpr, S_: tl.constexpr, D_: tl.constexpr,
):  # fmt: skip
    """A product would carry a NaN to earlier tokens, as 0 · NaN. It is cut out, and put into the later tokens of y."""
    k, h = chunk_and_part(H)
    start, tokens = tokens_of_chunk(k, start_K, end_K)
    token, state = start * H + h, (k * H + h) * S * (D + 1)
    log_decay = tl.load(log_decay_H + h)
    age_T, fade_T = since_start(log_decay)
    mass_S = load_mass(before_KHSE + state, S, D, S_)
    inverse_TS, broken = inverse_masses(write_MHS + token * S, tokens, mass_S, fade_T, log_decay, H, S, S_)
    share_TS = load_tile(read_MHS + token * S, tokens, H * S, 0, S, TOKENS, S_) * inverse_TS
    for d in range(0, D, D_):
        y_TD = dot(share_TS * fade_T[:, None], load_tile(before_KHSE + state, S, D + 1, d, D, S_, D_))
        broken_D = tl.zeros((D_,), tl.int32) + broken
        for j in range(0, TOKENS, BLOCK):
            write_JS = finite(load_block(write_MHS + token * S, j, tokens, H, 0, S, S_))
            value_JD = load_block(value_MHD + token * D, j, tokens, H, d, D, D_)
            broken_D = tl.minimum(broken_D, first_broken(value_JD, j))
            weight_TJ = dot(share_TS, tl.trans(write_JS)) * fades(ages(j), log_decay)
            y_TD += dot(weight_TJ, finite(value_JD))
        y_TD = tl.where(age_T[:, None] > broken_D[None, :], float("nan"), y_TD)
        store_tile(y_MHD + token * D, y_TD, tokens, H * D, d, D, TOKENS, D_)


@triton.jit
def read_backward_kernel(
    start_K, end_K, write_MHS, value_MHD, log_decay_H, read_MHS, before_KHSE, dy_MHD,
    d_read_MHS, d_write_MHS, d_value_MHD, d_before_KHSE, d_log_decay_KH,
    H: tl.constexpr, S: tl.constexpr, D: tl.constexpr, S_: tl.constexpr, D_: tl.constexpr,
):  # fmt: skip
    """First the gradients of a token's read and N, then those of what it wrote. Both need those of the weights r/N · w.

    Each decay is exp(log ρ · age): its gradient times the decay times the age is that of log ρ.
    """
    k, h = chunk_and_part(H)
    start, tokens = tokens_of_chunk(k, start_K, end_K)
    token, state = start * H + h, (k * H + h) * S * (D + 1)
    log_decay = tl.load(log_decay_H + h)
    age_T, fade_T = since_start(log_decay)
    mass_S = load_mass(before_KHSE + state, S, D, S_)
    inverse_TS, _ = inverse_masses(write_MHS + token * S, tokens, mass_S, fade_T, log_decay, H, S, S_)
    share_TS = load_tile(read_MHS + token * S, tokens, H * S, 0, S, TOKENS, S_) * inverse_TS
    d_share_TS = tl.zeros((TOKENS, S_), tl.float32)
    for d in range(0, D, D_):
        dy_TD = load_tile(dy_MHD + token * D, tokens, H * D, d, D, TOKENS, D_)
        memory_SD = load_tile(before_KHSE + state, S, D + 1, d, D, S_, D_)
        d_share_TS += dot(dy_TD, tl.trans(memory_SD))
        d_memory_SD = dot(tl.trans(share_TS * fade_T[:, None]), dy_TD)
        store_tile(d_before_KHSE + state, d_memory_SD, S, D + 1, d, D, S_, D_)
    d_share_TS *= fade_T[:, None]
    d_log_decay_T = tl.sum(share_TS * d_share_TS, axis=1) * age_T

    for j in range(0, TOKENS, BLOCK):
        write_JS = finite(load_block(write_MHS + token * S, j, tokens, H, 0, S, S_))
        d_weight_TJ = weight_gradients(dy_MHD + token * D, value_MHD + token * D, j, tokens, H, D, D_)
        d_share_TS += dot(d_weight_TJ * fades(ages(j), log_decay), write_JS)
    d_mass_TS = -d_share_TS * share_TS * inverse_TS
    d_log_decay_T += tl.sum(d_mass_TS * mass_S[None, :], axis=1) * fade_T * age_T
    store_tile(d_read_MHS + token * S, d_share_TS * inverse_TS, tokens, H * S, 0, S, TOKENS, S_)
    store_mass(d_before_KHSE + state, tl.sum(d_mass_TS * fade_T[:, None], axis=0), S, D, S_)

    for j in range(0, TOKENS, BLOCK):
        write_JS = finite(load_block(write_MHS + token * S, j, tokens, H, 0, S, S_))
        d_weight_TJ = weight_gradients(dy_MHD + token * D, value_MHD + token * D, j, tokens, H, D, D_)
        fade_TJ = fades(ages(j), log_decay)
        weight_TJ = dot(share_TS, tl.trans(write_JS)) * fade_TJ
        d_fade_TJ = d_weight_TJ * weight_TJ + dot(d_mass_TS, tl.trans(write_JS)) * fade_TJ
        d_log_decay_T += tl.sum(d_fade_TJ * ages(j), axis=1)
        d_write_JS = dot(tl.trans(d_weight_TJ * fade_TJ), share_TS) + dot(tl.trans(fade_TJ), d_mass_TS)
        store_tile(d_write_MHS + (token + j * H) * S, d_write_JS, tokens - j, H * S, 0, S, BLOCK, S_)
        for d in range(0, D, D_):
            dy_TD = load_tile(dy_MHD + token * D, tokens, H * D, d, D, TOKENS, D_)
            d_value_JD = dot(tl.trans(weight_TJ), dy_TD)
            store_tile(d_value_MHD + (token + j * H) * D, d_value_JD, tokens - j, H * D, d, D, BLOCK, D_)
    tl.store(d_log_decay_KH + k * H + h, tl.sum(d_log_decay_T, axis=0))


@triton.jit
def elements_of_state(H: tl.constexpr, X: tl.constexpr):
    """This program's document, int64, its head, the elements of its state that it scans, and which are no padding."""
    program, blocks = tl.program_id(0).to(tl.int64), tl.cdiv(X, ELEMENTS)
    x_X = (program % blocks * ELEMENTS) + tl.arange(0, ELEMENTS)
    return program // blocks // H, program // blocks % H, x_X, x_X < X


@triton.jit
def weight_gradients(dy, value, j, tokens, H: tl.constexpr, D: tl.constexpr, D_: tl.constexpr):
    d_weight_TJ = tl.zeros((TOKENS, BLOCK), tl.float32)
    for d in range(0, D, D_):
        value_JD = finite(load_block(value, j, tokens, H, d, D, D_))
        d_weight_TJ += dot(load_tile(dy, tokens, H * D, d, D, TOKENS, D_), tl.trans(value_JD))
    return d_weight_TJ


@triton.jit
def inverse_masses(write, tokens, mass_S, fade_T, log_decay, H: tl.constexpr, S: tl.constexpr, S_: tl.constexpr):
    """1/(N + ε), and the chunk's first token with a NaN or infinity in `write`, or `TOKENS`."""
    mass_TS = fade_T[:, None] * mass_S[None, :] + MASS_FLOOR
    broken_S = tl.full((S_,), TOKENS, tl.int32)
    for j in range(0, TOKENS, BLOCK):
        write_JS = load_block(write, j, tokens, H, 0, S, S_)
        broken_S = tl.minimum(broken_S, first_broken(write_JS, j))
        mass_TS += dot(fades(ages(j), log_decay), finite(write_JS))
    return 1 / mass_TS, tl.min(broken_S, axis=0)


@triton.jit
def dot(a_XY, b_YZ):
    return tl.dot(a_XY, b_YZ, input_precision="ieee")


@triton.jit
def fade_to_end(tokens, log_decay, R_: tl.constexpr):
    """The tokens after each of the first `R_` tokens, and the decay over them."""
    left_R = tl.maximum(tokens - 1 - tl.arange(0, R_), 0)
    return left_R, tl.exp(log_decay * left_R)


@triton.jit
def since_start(log_decay):
    """Age and decay of what was before the chunk, at each token."""
    age_T = tl.arange(0, TOKENS) + 1
    return age_T, tl.exp(log_decay * age_T)


@triton.jit
def ages(j):
    """Tokens from those of the block (columns) to each token (rows)."""
    return tl.arange(0, TOKENS)[:, None] - (j + tl.arange(0, BLOCK))[None, :]


@triton.jit
def fades(age_TJ, log_decay):
    """The decay, 0 of later tokens."""
    return tl.exp(tl.where(age_TJ < 0, float("-inf"), log_decay * age_TJ))


@triton.jit
def load_block(x, j, tokens, H: tl.constexpr, first, X: tl.constexpr, X_: tl.constexpr):
    """The `BLOCK` tokens from `j` on."""
    return load_tile(x + j * H * X, tokens - j, H * X, first, X, BLOCK, X_)


@triton.jit
def finite(x_JX):
    """x with 0 for each NaN and infinity."""
    return tl.where(tl.abs(x_JX) < float("inf"), x_JX, 0.0)


@triton.jit
def first_broken(x_JX, j):
    """The first token of each column with a NaN or infinity, or `TOKENS`."""
    token_JX = j + tl.arange(0, BLOCK)[:, None]
    return tl.min(tl.where(tl.abs(x_JX) < float("inf"), TOKENS, token_JX), axis=0)


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
