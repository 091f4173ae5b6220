"""Slot memory in Triton, for NVIDIA GPUs: what a chunk adds to M and N, the scan over chunks, and the read, with
closed-form gradients.

A program computes one head of a chunk of 64 tokens in float32, one token after another, with M in registers. It loads
and stores values and their gradients in their own dtype, all else in float32. For sums over slots, a thread has all
slots of a channel. For sums over channels, it has channels of one slot. So it adds most terms without other threads,
and no product with a matrix carries a NaN to an earlier token. The backward computes N and the shares r/N again. The
scan is float64.

For a token of a head of 16 slots and 28 channels in bfloat16, a warp executes 137 instructions forward and 380
backward, scans not included (sm_90: `pytest -s tests/full/test_kernels_compile.py`).

Shapes as in `tost_lm.mixers.slots.memory`; K chunks. Inside a kernel: S slots and D channels, padded to powers of two
(`S_`, `D_`). Wide heads take `D_` channels at a time. Padding is 0 and adds nothing to any sum.
"""
# ruff: noqa: RUF005  (Triton has no starred expressions)
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
from tost_lm.ops.precision import running_dtype
from tost_lm.ops.triton_tokens import (
    MASS_FLOOR,
    cdiv,
    chunk_and_part,
    load_token,
    next_power_of_2,
    reciprocal,
    store_token,
    tokens_of_chunk,
)
from tost_lm.sizes import TRITON_SLOT_CHUNK_TOKENS

TOKENS = TRITON_SLOT_CHUNK_TOKENS
STEP = tl.constexpr(4)
"""Tokens whose loads are issued together."""
CHANNELS = 32
"""Channels at a time: a thread has up to 64 of their slots."""
ELEMENTS = tl.constexpr(128)
"""Elements of a head's M and N that a program scans over the chunks, one in each thread."""
AHEAD = tl.constexpr(8)
"""Chunks whose loads the scan issues together."""


def slot_memory_chunks(
    read_MHS: Tensor, write_MHS: Tensor, value_MHD: Tensor, initial_nHSE: Tensor, log_decay_H: Tensor,
    lengths: Sequence[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y [M, H, D], and M and N after each document, [n, H, S, E], from those before it."""
    read, write, value = read_MHS.float().contiguous(), write_MHS.float().contiguous(), value_MHD.contiguous()
    return _SlotMemory.apply(read, write, value, initial_nHSE, log_decay_H, lengths)


def final_state(
    write_MHS: Tensor, value_MHD: Tensor, initial_nHSE: Tensor, log_decay_H: Tensor, lengths: Sequence[int]
) -> Tensor:
    """M and N after each document, without the reads."""
    write, value = write_MHS.float().contiguous(), value_MHD.contiguous()
    return _SlotMemory.apply(None, write, value, initial_nHSE, log_decay_H, lengths)[1]


class _SlotMemory(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, read_MHS: Tensor | None, write_MHS: Tensor, value_MHD: Tensor, initial_nHSE: Tensor, log_decay_H: Tensor,
        lengths: Sequence[int],
    ):  # fmt: skip
        layout = document_layout((0, *accumulate(lengths)), TOKENS, value_MHD.device)
        shape = len(layout.start_K), *initial_nHSE.shape[1:]
        sums_KHSE = write_MHS.new_empty(shape, dtype=running_dtype(write_MHS.device))
        before_KHSE, initial_nHSE = write_MHS.new_empty(shape), initial_nHSE.contiguous()  # empty_like keeps strides
        final_nHSE, rate_H = torch.empty_like(initial_nHSE), log_decay_H.expm1()
        _launch(sums_kernel, layout, write_MHS, value_MHD, rate_H, sums_KHSE)
        _launch_scan(scan_kernel, layout, log_decay_H, sums_KHSE, initial_nHSE, before_KHSE, final_nHSE)
        y_MHD = None
        if read_MHS is not None:
            y_MHD, share_MHS = torch.empty_like(value_MHD), torch.empty_like(read_MHS)
            _launch(read_kernel, layout, write_MHS, value_MHD, rate_H, read_MHS, before_KHSE, share_MHS, y_MHD)
        ctx.save_for_backward(read_MHS, write_MHS, value_MHD, before_KHSE, log_decay_H)
        ctx.layout = layout
        return y_MHD, final_nHSE

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_MHD: Tensor | None, d_final_nHSE: Tensor):
        read_MHS, write_MHS, value_MHD, before_KHSE, log_decay_H = ctx.saved_tensors
        d_read_MHS = share_MHS = d_mass_MHS = d_before_KHSE = None
        inputs = write_MHS, value_MHD, log_decay_H.expm1()
        if read_MHS is not None:
            d_read_MHS, share_MHS, d_mass_MHS = (torch.empty_like(read_MHS) for _ in range(3))
            d_before_KHSE = torch.empty_like(before_KHSE)
            _launch(
                read_backward_kernel, ctx.layout, *inputs, read_MHS, before_KHSE, _transposed(before_KHSE), dy_MHD,
                share_MHS, d_read_MHS, d_mass_MHS, d_before_KHSE,
            )  # fmt: skip
        d_final_nHSE = d_final_nHSE.contiguous()  # empty_like keeps strides
        d_after_KHSE, d_initial_nHSE = torch.empty_like(before_KHSE), torch.empty_like(d_final_nHSE)
        _launch_scan(
            scan_backward_kernel, ctx.layout, log_decay_H, d_before_KHSE, d_final_nHSE, d_after_KHSE, d_initial_nHSE
        )
        d_write_MHS, d_value_MHD = torch.empty_like(write_MHS), torch.empty_like(value_MHD)
        d_log_decay_KH = log_decay_H.new_empty(before_KHSE.shape[:2])
        _launch(
            write_backward_kernel, ctx.layout, *inputs, before_KHSE, d_after_KHSE, _transposed(d_after_KHSE), dy_MHD,
            share_MHS, d_mass_MHS, d_write_MHS, d_value_MHD, d_log_decay_KH,
        )  # fmt: skip
        return d_read_MHS, d_write_MHS, d_value_MHD, d_initial_nHSE, d_log_decay_KH.sum(0), None


def _transposed(state_KHSE: Tensor) -> Tensor:
    """With neighbouring slots in neighbouring places, and so in neighbouring threads."""
    return state_KHSE.mT.contiguous()


def _launch(kernel: Any, layout: Layout, write_MHS: Tensor, value_MHD: Tensor, *tensors: Tensor | None) -> None:
    M, H, S = write_MHS.shape
    D, chunks = value_MHD.shape[-1], layout.start_K.shape[0]
    S_, D_ = next_power_of_2(S), min(CHANNELS, next_power_of_2(D))
    arguments = (layout.start_K, layout.end_K, write_MHS, value_MHD, *tensors)
    # One warp: where a kernel stores over what it has loaded, no thread is late.
    with torch.cuda.device_of(value_MHD):
        kernel[(chunks * H,)](
            *(None if x is None else x.contiguous() for x in arguments),
            H=H, S=S, D=D, S_=S_, D_=D_, FULL=chunks * TOKENS == M, num_warps=1,
        )  # fmt: skip


def _launch_scan(kernel: Any, layout: Layout, log_decay_H: Tensor, *tensors: Tensor | None) -> None:
    H, X = len(log_decay_H), next(x for x in tensors if x is not None)[0, 0].numel()
    arguments = (layout.start_K, layout.end_K, layout.first_chunk_N1, log_decay_H, *tensors)
    with torch.cuda.device_of(log_decay_H):
        kernel[(layout.documents * H * cdiv(X, ELEMENTS.value),)](
            *(None if x is None else x.contiguous() for x in arguments), H=H, X=X, FULL_CHUNK=TOKENS,
            num_warps=ELEMENTS.value // 32,
        )  # fmt: skip


@triton.jit
def sums_kernel(
    start_K, end_K, write_MHS, value_MHD, rate_H, sums_KHSE,
    H: tl.constexpr, S: tl.constexpr, D: tl.constexpr, S_: tl.constexpr, D_: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    k, h = chunk_and_part(H)
    start, tokens = tokens_of_chunk(k, start_K, end_K)
    limit = None if FULL else tokens
    rate = tl.load(rate_H + h)
    s_S = tl.arange(0, S_)
    write_TS, sums_SE = write_MHS + (start * H + h) * S + s_S, sums_KHSE + (k * H + h) * S * (D + 1)
    mass_S = tl.zeros((S_,), tl.float32)
    for i in range(0, tokens, STEP):
        for j in tl.static_range(STEP):
            write_S = load_token(write_TS, i, j, limit, s_S < S, H * S)
            mass_S = decayed(mass_S, rate, i + j, limit) + write_S
    tl.store(sums_SE + s_S * (D + 1) + D, mass_S.to(sums_SE.dtype.element_ty), mask=s_S < S)
    for d in range(0, D, D_):
        d_D = d + tl.arange(0, D_)
        value_TD = value_MHD + (start * H + h) * D + d_D
        memory_SD = tl.zeros((S_, D_), tl.float32)
        for i in range(0, tokens, STEP):
            for j in tl.static_range(STEP):
                write_S = load_token(write_TS, i, j, limit, s_S < S, H * S)
                value_D = load_token(value_TD, i, j, limit, d_D < D, H * D)
                memory_SD = decayed(memory_SD, rate, i + j, limit) + write_S[:, None] * value_D[None, :]
        places_SD = s_S[:, None] * (D + 1) + d_D[None, :]
        real_SD = (s_S < S)[:, None] & (d_D < D)[None, :]
        tl.store(sums_SE + places_SD, memory_SD.to(sums_SE.dtype.element_ty), mask=real_SD)


@triton.jit
def scan_kernel(
    start_K, end_K, first_chunk_N1, log_decay_H, sums_KHX, initial_nHX, before_KHX, final_nHX,
    H: tl.constexpr, X: tl.constexpr, FULL_CHUNK: tl.constexpr,
):  # fmt: skip
    n, h, x_X, real_X = elements_of_state(H, X)
    log_decay = tl.load(log_decay_H + h).to(tl.float64)
    decay_of_full = tl.exp(log_decay * FULL_CHUNK)
    end = tl.load(first_chunk_N1 + n + 1)
    state_X = tl.load(initial_nHX + (n * H + h) * X + x_X, mask=real_X, other=0.0)
    for k in range(tl.load(first_chunk_N1 + n), end, AHEAD):
        loaded = ()
        for j in tl.static_range(AHEAD):
            places_X = ((k + j) * H + h) * X + x_X
            loaded = loaded + (tl.load(sums_KHX + places_X, mask=real_X & (k + j < end), other=0.0),)
        for j in tl.static_range(AHEAD):
            if k + j < end:
                tl.store(before_KHX + ((k + j) * H + h) * X + x_X, state_X.to(tl.float32), mask=real_X)
                decay = decay_of_chunk(k + j, start_K, end_K, log_decay, decay_of_full, FULL_CHUNK)
                state_X = decay * state_X + loaded[j]
    tl.store(final_nHX + (n * H + h) * X + x_X, state_X, mask=real_X)


@triton.jit
def read_kernel(
    start_K, end_K, write_MHS, value_MHD, rate_H, read_MHS, before_KHSE, share_MHS, y_MHD,
    H: tl.constexpr, S: tl.constexpr, D: tl.constexpr, S_: tl.constexpr, D_: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    k, h = chunk_and_part(H)
    start, tokens = tokens_of_chunk(k, start_K, end_K)
    limit = None if FULL else tokens
    rate = tl.load(rate_H + h)
    s_S = tl.arange(0, S_)
    places_TS, before_SE = (start * H + h) * S + s_S, before_KHSE + (k * H + h) * S * (D + 1)
    mass_S = tl.load(before_SE + s_S * (D + 1) + D, mask=s_S < S, other=0.0)
    for i in range(0, tokens, STEP):
        for j in tl.static_range(STEP):
            read_S = load_token(read_MHS + places_TS, i, j, limit, s_S < S, H * S)
            mass_S = decayed(mass_S, rate) + load_token(write_MHS + places_TS, i, j, limit, s_S < S, H * S)
            share_S = read_S * reciprocal(mass_S + MASS_FLOOR)
            store_token(share_MHS + places_TS, share_S, i, j, limit, s_S < S, H * S)
    tl.debug_barrier()  # all shares are stored before a thread loads them
    for d in range(0, D, D_):
        d_D = d + tl.arange(0, D_)
        places_TD = (start * H + h) * D + d_D
        real_SD = (s_S < S)[:, None] & (d_D < D)[None, :]
        memory_SD = tl.load(before_SE + s_S[:, None] * (D + 1) + d_D[None, :], mask=real_SD, other=0.0)
        for i in range(0, tokens, STEP):
            for j in tl.static_range(STEP):
                write_S = load_token(write_MHS + places_TS, i, j, limit, s_S < S, H * S)
                share_S = load_token(share_MHS + places_TS, i, j, limit, s_S < S, H * S)
                value_D = load_token(value_MHD + places_TD, i, j, limit, d_D < D, H * D)
                memory_SD = decayed(memory_SD, rate) + write_S[:, None] * value_D[None, :]
                y_D = tl.sum(share_S[:, None] * memory_SD, axis=0)
                store_token(y_MHD + places_TD, y_D, i, j, limit, d_D < D, H * D)


@triton.jit
def read_backward_kernel(
    start_K, end_K, write_MHS, value_MHD, rate_H, read_MHS, before_KHSE, before_KHES, dy_MHD,
    share_MHS, d_read_MHS, d_mass_MHS, d_before_KHSE,
    H: tl.constexpr, S: tl.constexpr, D: tl.constexpr, S_: tl.constexpr, D_: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """The gradients of r, and by the reads of this chunk alone, of each token's N and of M and N before the chunk.

    `d_read_MHS` first holds 1/N, `d_mass_MHS` the gradient of r/N.
    """
    k, h = chunk_and_part(H)
    start, tokens = tokens_of_chunk(k, start_K, end_K)
    limit = None if FULL else tokens
    rate = tl.load(rate_H + h)
    s_S = tl.arange(0, S_)
    places_TS, state = (start * H + h) * S + s_S, (k * H + h) * S * (D + 1)
    mass_S = tl.load(before_KHSE + state + s_S * (D + 1) + D, mask=s_S < S, other=0.0)
    for i in range(0, tokens, STEP):
        for j in tl.static_range(STEP):
            read_S = load_token(read_MHS + places_TS, i, j, limit, s_S < S, H * S)
            mass_S = decayed(mass_S, rate) + load_token(write_MHS + places_TS, i, j, limit, s_S < S, H * S)
            inverse_S = reciprocal(mass_S + MASS_FLOOR)
            store_token(share_MHS + places_TS, read_S * inverse_S, i, j, limit, s_S < S, H * S)
            store_token(d_read_MHS + places_TS, inverse_S, i, j, limit, s_S < S, H * S)

    for d in range(0, D, D_):
        d_D = d + tl.arange(0, D_)
        places_TD = (start * H + h) * D + d_D
        real_DS = (d_D < D)[:, None] & (s_S < S)[None, :]
        memory_DS = tl.load(before_KHES + state + d_D[:, None] * S + s_S[None, :], mask=real_DS, other=0.0)
        for i in range(0, tokens, STEP):
            for j in tl.static_range(STEP):
                write_S = load_token(write_MHS + places_TS, i, j, limit, s_S < S, H * S)
                value_D = load_token(value_MHD + places_TD, i, j, limit, d_D < D, H * D)
                dy_D = load_token(dy_MHD + places_TD, i, j, limit, d_D < D, H * D)
                memory_DS = decayed(memory_DS, rate) + value_D[:, None] * write_S[None, :]
                d_share_S = tl.sum(dy_D[:, None] * memory_DS, axis=0)
                if d > 0:
                    d_share_S += load_token(d_mass_MHS + places_TS, i, j, limit, s_S < S, H * S)
                store_token(d_mass_MHS + places_TS, d_share_S, i, j, limit, s_S < S, H * S)
        tl.debug_barrier()  # all is stored before a thread loads it, here and above

    d_before_S, decay = tl.zeros((S_,), tl.float32), 1 + rate
    for i in range(0, tokens, STEP):
        for j in tl.static_range(STEP):
            share_S = load_token(share_MHS + places_TS, i, j, limit, s_S < S, H * S)
            inverse_S = load_token(d_read_MHS + places_TS, i, j, limit, s_S < S, H * S)
            d_share_S = load_token(d_mass_MHS + places_TS, i, j, limit, s_S < S, H * S)
            d_read_S = d_share_S * inverse_S
            store_token(d_read_MHS + places_TS, d_read_S, i, j, limit, s_S < S, H * S)
            store_token(d_mass_MHS + places_TS, -d_read_S * share_S, i, j, limit, s_S < S, H * S)
            d_before_S -= decay * (d_read_S * share_S)
            decay = decayed(decay, rate)
    tl.store(d_before_KHSE + state + s_S * (D + 1) + D, d_before_S, mask=s_S < S)
    for d in range(0, D, D_):
        d_D = d + tl.arange(0, D_)
        d_before_SD, decay = tl.zeros((S_, D_), tl.float32), 1 + rate
        for i in range(0, tokens, STEP):
            for j in tl.static_range(STEP):
                share_S = load_token(share_MHS + places_TS, i, j, limit, s_S < S, H * S)
                dy_D = load_token(dy_MHD + (start * H + h) * D + d_D, i, j, limit, d_D < D, H * D)
                d_before_SD += share_S[:, None] * (decay * dy_D)[None, :]
                decay = decayed(decay, rate)
        real_SD = (s_S < S)[:, None] & (d_D < D)[None, :]
        tl.store(d_before_KHSE + state + s_S[:, None] * (D + 1) + d_D[None, :], d_before_SD, mask=real_SD)


@triton.jit
def scan_backward_kernel(
    start_K, end_K, first_chunk_N1, log_decay_H, d_before_KHX, d_final_nHX, d_after_KHX, d_initial_nHX,
    H: tl.constexpr, X: tl.constexpr, FULL_CHUNK: tl.constexpr,
):  # fmt: skip
    n, h, x_X, real_X = elements_of_state(H, X)
    log_decay = tl.load(log_decay_H + h).to(tl.float64)
    decay_of_full = tl.exp(log_decay * FULL_CHUNK)
    first, end = tl.load(first_chunk_N1 + n), tl.load(first_chunk_N1 + n + 1)
    d_state_X = tl.load(d_final_nHX + (n * H + h) * X + x_X, mask=real_X, other=0.0)
    for i in range(0, end - first, AHEAD):
        last, loaded = end - 1 - i, ()
        if d_before_KHX is not None:
            for j in tl.static_range(AHEAD):
                places_X = ((last - j) * H + h) * X + x_X
                loaded = loaded + (tl.load(d_before_KHX + places_X, mask=real_X & (last - j >= first), other=0.0),)
        for j in tl.static_range(AHEAD):
            if last - j >= first:
                tl.store(d_after_KHX + ((last - j) * H + h) * X + x_X, d_state_X.to(tl.float32), mask=real_X)
                d_state_X *= decay_of_chunk(last - j, start_K, end_K, log_decay, decay_of_full, FULL_CHUNK)
                if d_before_KHX is not None:
                    d_state_X += loaded[j]
    tl.store(d_initial_nHX + (n * H + h) * X + x_X, d_state_X, mask=real_X)


@triton.jit
def write_backward_kernel(
    start_K, end_K, write_MHS, value_MHD, rate_H, before_KHSE, d_after_KHSE, d_after_KHES, dy_MHD,
    share_MHS, d_mass_MHS, d_write_MHS, d_value_MHD, d_log_decay_KH,
    H: tl.constexpr, S: tl.constexpr, D: tl.constexpr, S_: tl.constexpr, D_: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """The gradients of w, u and log ρ, from those of M and N after the chunk and the reads of the chunk, if any.

    With dM_t and dN_t the gradients of M and N after token t, that of log ρ is the sum over tokens of
    g_t = ⟨dM_t, ρ·M_{t−1}⟩ + ⟨dN_t, ρ·N_{t−1}⟩. The first g is computed as written, and g_{t+1} − g_t is the sum over
    slots of w·dw + ε·dN, with the part of dN that token t reads.
    """
    k, h = chunk_and_part(H)
    start, tokens = tokens_of_chunk(k, start_K, end_K)
    limit = None if FULL else tokens
    rate = tl.load(rate_H + h)
    s_S = tl.arange(0, S_)
    places_TS, state = (start * H + h) * S + s_S, (k * H + h) * S * (D + 1)
    steps = tl.cdiv(tokens, STEP)
    d_mass_S = tl.load(d_after_KHSE + state + s_S * (D + 1) + D, mask=s_S < S, other=0.0)
    for steps_after in range(0, steps):
        i = (steps - 1 - steps_after) * STEP
        for j in tl.static_range(STEP - 1, -1, -1):
            if d_mass_MHS is not None:
                d_mass_S += load_token(d_mass_MHS + places_TS, i, j, limit, s_S < S, H * S)
            store_token(d_write_MHS + places_TS, d_mass_S, i, j, limit, s_S < S, H * S)
            d_mass_S = decayed(d_mass_S, rate, i + j, limit)
    mass_S = tl.load(before_KHSE + state + s_S * (D + 1) + D, mask=s_S < S, other=0.0)
    first = tl.sum(d_mass_S * mass_S, axis=0)

    for d in range(0, D, D_):
        tl.debug_barrier()  # dw is stored before a thread loads it
        d_D = d + tl.arange(0, D_)
        places_TD = (start * H + h) * D + d_D
        real_DS = (d_D < D)[:, None] & (s_S < S)[None, :]
        d_memory_DS = tl.load(d_after_KHES + state + d_D[:, None] * S + s_S[None, :], mask=real_DS, other=0.0)
        for steps_after in range(0, steps):
            i = (steps - 1 - steps_after) * STEP
            for j in tl.static_range(STEP - 1, -1, -1):
                value_D = load_token(value_MHD + places_TD, i, j, limit, d_D < D, H * D)
                if share_MHS is not None:
                    share_S = load_token(share_MHS + places_TS, i, j, limit, s_S < S, H * S)
                    dy_D = load_token(dy_MHD + places_TD, i, j, limit, d_D < D, H * D)
                    d_memory_DS += dy_D[:, None] * share_S[None, :]
                d_write_S = load_token(d_write_MHS + places_TS, i, j, limit, s_S < S, H * S)
                d_write_S += tl.sum(value_D[:, None] * d_memory_DS, axis=0)
                store_token(d_write_MHS + places_TS, d_write_S, i, j, limit, s_S < S, H * S)
                d_memory_DS = decayed(d_memory_DS, rate, i + j, limit)

        real_SD = (s_S < S)[:, None] & (d_D < D)[None, :]
        places_SD = s_S[:, None] * (D + 1) + d_D[None, :]
        d_memory_SD = tl.load(d_after_KHSE + state + places_SD, mask=real_SD, other=0.0)
        for steps_after in range(0, steps):
            i = (steps - 1 - steps_after) * STEP
            for j in tl.static_range(STEP - 1, -1, -1):
                write_S = load_token(write_MHS + places_TS, i, j, limit, s_S < S, H * S)
                if share_MHS is not None:
                    share_S = load_token(share_MHS + places_TS, i, j, limit, s_S < S, H * S)
                    dy_D = load_token(dy_MHD + places_TD, i, j, limit, d_D < D, H * D)
                    d_memory_SD += share_S[:, None] * dy_D[None, :]
                d_value_D = tl.sum(write_S[:, None] * d_memory_SD, axis=0)
                store_token(d_value_MHD + places_TD, d_value_D, i, j, limit, d_D < D, H * D)
                d_memory_SD = decayed(d_memory_SD, rate, i + j, limit)
        memory_SD = tl.load(before_KHSE + state + places_SD, mask=real_SD, other=0.0)
        first += tl.sum(tl.sum(d_memory_SD * memory_SD, axis=1), axis=0)

    tl.debug_barrier()
    changes_S = tl.zeros((S_,), tl.float32)
    for i in range(0, tokens, STEP):
        for j in tl.static_range(STEP):
            write_S = load_token(write_MHS + places_TS, i, j, limit, s_S < S, H * S)
            change_S = write_S * load_token(d_write_MHS + places_TS, i, j, limit, s_S < S, H * S)
            if d_mass_MHS is not None:
                change_S += MASS_FLOOR * load_token(d_mass_MHS + places_TS, i, j, limit, s_S < S, H * S)
            changes_S += (tokens - 1 - i - j).to(tl.float32) * change_S
    tl.store(d_log_decay_KH + k * H + h, tokens * first + tl.sum(changes_S, axis=0))


@triton.jit
def decayed(state, rate, t=0, limit=None):
    """The part of the state that token t of the chunk keeps: ρ, or all if the token is padding. `rate` is ρ − 1,
    because ρ itself would round long half-lives."""
    return state + state * (rate if limit is None else tl.where(t < limit, rate, 0.0))


@triton.jit
def decay_of_chunk(k, start_K, end_K, log_decay, decay_of_full, FULL_CHUNK: tl.constexpr):
    """ρ^tokens in float64. Few chunks are not full, and an exponential is most of a step of the scan."""
    _, tokens = tokens_of_chunk(k, start_K, end_K)
    decay = decay_of_full
    if tokens < FULL_CHUNK:
        decay = tl.exp(log_decay * tokens)
    return decay


@triton.jit
def elements_of_state(H: tl.constexpr, X: tl.constexpr):
    """This program's document, int64, its head, the elements of its state that it scans, and which are no padding."""
    program, blocks = tl.program_id(0).to(tl.int64), tl.cdiv(X, ELEMENTS)
    x_X = (program % blocks * ELEMENTS) + tl.arange(0, ELEMENTS)
    return program // blocks // H, program // blocks % H, x_X, x_X < X
