"""Common code of the kernels: the launch shape, loads and stores, formulas, and the scan from the sum of each chunk to
the sum over each document's earlier (or later) chunks.

Shapes inside a kernel: G heads that a program has at once and D channels of a head, both padded to powers of two (`G_`,
`D_`); T tokens of a chunk, always `TOKENS`; J of these tokens, whose code is unrolled, `STEP` or fewer; all H heads,
padded (`H_`). Padding has w = 0, dy = 0 and Π = 0, and adds nothing to any sum. Sums over tokens add to later tokens
only: a NaN never reaches an earlier token, as it would in a product with a triangular matrix.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from tost_lm.mixers.tssa import statistics
from tost_lm.mixers.tssa.phases import Inputs, Sums
from tost_lm.ops import precision
from tost_lm.ops.layout import Layout
from tost_lm.sizes import TRITON_CHUNK_TOKENS

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportCallIssue=false


ENERGY_FLOOR, MASS_FLOOR = tl.constexpr(statistics.ENERGY_FLOOR), tl.constexpr(precision.MASS_FLOOR)
INTERPRETED = tl.constexpr(knobs.runtime.interpret)
TOKENS = tl.constexpr(TRITON_CHUNK_TOKENS)
STEP = tl.constexpr(8)
THREADS = 64
"""Threads of a program, unless one head needs more."""
FEW_CHUNKS = 1024
"""With fewer programs, a large GPU is partly idle."""
cdiv, next_power_of_2 = cache(triton.cdiv), cache(triton.next_power_of_2)
"""Triton's own take microseconds a call on the host, because kernels can call them too."""


def chunk_tokens(heads: int, channels: int, device: torch.device) -> int:
    """Tokens of a chunk for any H and D."""
    return TOKENS.value


def launch(kernel: Any, inputs: Inputs, *tensors: Tensor, channels: int, **arguments: Any) -> None:
    """Run `kernel` on w, the chunk boundaries, `tensors` (made contiguous) and `arguments` (passed unchanged).

    A thread has `channels` channels of a token. A program has a group of heads of a chunk, or in stages with a softmax
    all groups, one after another. The launch shape depends on H and D alone: nothing is tuned or compiled for a length,
    but where all chunks are full, kernels have no masks.
    """
    w_MHD, layout = inputs.w_MHD, inputs.layout
    M, H, D = w_MHD.shape
    D_ = max(16, next_power_of_2(D))
    G_ = min(next_power_of_2(H), max(1, THREADS * channels // D_))
    groups, chunks = cdiv(H, G_), layout.start_K.shape[0]
    all_heads = arguments.get("STAGE") in ("all", "softmax")
    if all_heads:
        arguments["GROUPS"] = groups
    with torch.cuda.device_of(w_MHD):
        kernel[(chunks * (1 if all_heads else groups),)](
            *(x.contiguous() for x in (w_MHD, layout.start_K, layout.end_K, *tensors)),
            **arguments,
            H=H,
            D=D,
            G_=G_,
            D_=D_,
            FULL=chunks * TOKENS.value == M,
            num_warps=max(1, G_ * D_ // (32 * channels)),
        )


def scoring_arguments(inputs: Inputs) -> dict[str, Any]:
    """The additional arguments of kernels that compute scores."""
    bias_BHT = inputs.bias_BHT
    bias_strides = (0, 0, 0) if bias_BHT is None else bias_BHT.stride()
    return {
        "temp_H": inputs.temp_H.contiguous(),
        "bias_BHT": bias_BHT,
        **dict(zip(("stride_b", "stride_h", "stride_t"), bias_strides, strict=True)),
        "T": 1 if bias_BHT is None else bias_BHT.shape[2],
        "H_": next_power_of_2(inputs.w_MHD.shape[1]),
    }


RUN_TIME = ["T", "stride_b", "stride_h", "stride_t"]
"""Integer arguments that must not cause a recompilation."""


def in_stages(
    run: Callable[[str, Tensor], None],
    stages: Sequence[str],
    inputs: Inputs,
    softmax: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Run the stages before, in and after the softmax over heads, or the first and last around a given one, on a tensor
    [M, H], which is returned.

    Stage "all" is one kernel that loops over the heads of a chunk. It needs many chunks to fill a GPU; its second read
    of w comes from the cache. With few chunks, the second read of three kernels comes from the cache as well.
    """
    x_MH = torch.empty(inputs.w_MHD.shape[:2], device=inputs.w_MHD.device)
    if softmax is not None:
        run(stages[0], x_MH)
        x_MH = softmax(x_MH).contiguous()
        run(stages[-1], x_MH)
        return x_MH
    for stage in stages if inputs.layout.start_K.shape[0] < FEW_CHUNKS else ("all",):
        run(stage, x_MH)
    return x_MH


@triton.jit
def tokens_of_program(start_K, end_K, PARTS: tl.constexpr, FULL: tl.constexpr):
    """This program's chunk, int64, and its part of the chunk; the chunk's first token, int64, its number of tokens, and
    the same as a limit of masks, but None where all chunks are full. Consecutive programs have the parts of one chunk,
    so together they read whole tokens."""
    k = (tl.program_id(0) // PARTS).to(tl.int64)
    start = tl.load(start_K + k)
    tokens = (tl.load(end_K + k) - start).to(tl.int32)
    return k, tl.program_id(0) % PARTS, start, tokens, None if FULL else tokens


@triton.jit
def load_token(x, i, j: tl.constexpr, limit, real, STRIDE: tl.constexpr):
    """Token i + j of the chunk, [G, D] or [G], in float32. `x` points to its first token."""
    mask = real if limit is None else real & (i + j < limit)
    return tl.load(x + i * STRIDE + j * STRIDE, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_token(x, value, i, j: tl.constexpr, limit, real, STRIDE: tl.constexpr):
    mask = real if limit is None else real & (i + j < limit)
    tl.store(x + i * STRIDE + j * STRIDE, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def reciprocal(x):
    """1/x in one instruction, off by at most one unit in the last place (PTX ISA); 0 for x > 2^126."""
    if INTERPRETED:
        inverse = 1 / x
    else:
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return inverse


@triton.jit
def real_tokens(t, limit):
    """Which tokens t of a chunk are no padding. `limit`, the tokens of the chunk, is None where all chunks are full."""
    return t < (TOKENS if limit is None else limit)


@triton.jit
def heads_of_group(g, H: tl.constexpr, D: tl.constexpr, G_: tl.constexpr, D_: tl.constexpr):
    """The heads of a group and the offsets of their channels in a token, each with what is no padding."""
    h_G, d_D = g * G_ + tl.arange(0, G_), tl.arange(0, D_)
    real_G = h_G < H if H % G_ != 0 else tl.full((G_,), True, tl.int1)
    return h_G, real_G, h_G[:, None] * D + d_D[None, :], real_G[:, None] & (d_D < D)[None, :]


@triton.jit
def load_sums(x, real):
    return tl.load(x, mask=real, other=0.0).to(tl.float32)


@triton.jit
def stack(x):
    """[G, J] from [G] of each of the 8 tokens of a step. Joining them pairwise moves no data between threads."""
    first_G22 = tl.join(tl.join(x[0], x[4]), tl.join(x[2], x[6]))
    second_G22 = tl.join(tl.join(x[1], x[5]), tl.join(x[3], x[7]))
    return tl.reshape(tl.join(first_G22, second_G22), (x[0].shape[0], 8))


@triton.jit
def places_of_step(i, limit, h_G, real_G, H: tl.constexpr):
    """[G, J]: the offsets of the tokens of a step in [T, H], and which are no padding."""
    t_J = i + tl.arange(0, STEP)
    real_GJ = real_G[:, None] & real_tokens(t_J, limit)[None, :]
    return t_J[None, :] * H + h_G[:, None], real_GJ


@triton.jit
def places_of_heads(start, limit, H: tl.constexpr, H_: tl.constexpr):
    """[T, H]: the offsets of a chunk's tokens and heads in [M, H], and which are no padding."""
    t_T, h_H = tl.arange(0, TOKENS), tl.arange(0, H_)
    return start * H + t_T[:, None] * H + h_H[None, :], real_tokens(t_T, limit)[:, None], (h_H < H)[None, :]


@triton.jit
def sum_of_thread(x_GD, CHANNELS: tl.constexpr):
    """The sums of each `CHANNELS` neighbouring channels, those of one thread."""
    return tl.sum(tl.reshape(x_GD, (x_GD.shape[0], x_GD.shape[1] // CHANNELS, CHANNELS)), axis=2)


@triton.jit
def inverse_energies(energy):
    """1/S1 with S1 at least the floor. A NaN stays NaN."""
    return reciprocal(tl.maximum(energy, ENERGY_FLOOR, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def load_bias(i, limit, start, h_G, real_G, bias_BHT, T, stride_b, stride_h, stride_t, D: tl.constexpr):
    """The bias in z/temp of the tokens of a step, [G, J]."""
    t_J = i + tl.arange(0, STEP)
    # A chunk lies in one sequence.
    places_GJ = start // T * stride_b + h_G[:, None] * stride_h + ((start % T + t_J) * stride_t)[None, :]
    bias_GJ = tl.load(bias_BHT + places_GJ, mask=real_G[:, None] & real_tokens(t_J, limit)[None, :], other=0.0)
    return bias_GJ.to(tl.float32) * D


NARROW, WIDE = (128, 16, 4), (512, 8, 8)
"""Chunks and columns in a step of the scan, and warps. A document of 1M tokens has 64 wide steps, one after another."""


def sums(sum_K: Tensor, layout: Layout, reverse: bool = False) -> Sums:
    """Scan `sum_K` [K, …], the sum of each chunk; `reverse` sums over later chunks instead of earlier ones."""
    chunk = torch.empty_like(sum_K)
    document = sum_K.new_empty(layout.documents, *sum_K.shape[1:])
    columns = sum_K[0].numel()
    chunks_of_step, columns_of_step, warps = WIDE if layout.longest > NARROW[0] else NARROW
    blocks = cdiv(columns, columns_of_step)
    with torch.cuda.device_of(sum_K):
        scan_kernel[(layout.documents * blocks,)](
            sum_K, chunk, document, layout.first_chunk_N1, columns, blocks, reverse, chunks_of_step, columns_of_step,
            num_warps=warps,
        )  # fmt: skip
    return Sums(chunk, document)


@triton.jit
def scan_kernel(
    part_KX, chunk_KX, document_NX, first_chunk_N1, columns, blocks,
    REVERSE: tl.constexpr, K_: tl.constexpr, X_: tl.constexpr,
):  # fmt: skip
    """A group of columns of one document. It reads no chunk of another document, so even a NaN stays in its own."""
    n = (tl.program_id(0) // blocks).to(tl.int64)
    x_X = tl.program_id(0) % blocks * X_ + tl.arange(0, X_)
    real_X = x_X < columns
    first = tl.load(first_chunk_N1 + n)
    chunks = tl.load(first_chunk_N1 + n + 1) - first
    step = -1 if REVERSE else 1
    origin = first + chunks - 1 if REVERSE else first
    carry_X = tl.zeros((X_,), tl.float64)  # float32 would lose precision over many steps
    tl.store(chunk_KX + origin * columns + x_X, carry_X.to(tl.float32), mask=real_X & (chunks > 0))
    for i in range(0, chunks, K_):
        i_K = i + tl.arange(0, K_)
        places_KX = (origin + step * i_K)[:, None] * columns + x_X[None, :]
        part_of_step_KX = tl.load(part_KX + places_KX, mask=(i_K < chunks)[:, None] & real_X[None, :], other=0.0)
        sum_KX = carry_X[None, :] + tl.cumsum(part_of_step_KX, axis=0).to(tl.float64)
        # Stored at the next chunk, as the sum over the chunks before it: subtracting a chunk's own sum would cancel.
        has_next_K = i_K + 1 < chunks
        next_KX = places_KX + step * columns
        tl.store(chunk_KX + next_KX, sum_KX.to(tl.float32), mask=has_next_K[:, None] & real_X[None, :])
        carry_X += tl.sum(part_of_step_KX, axis=0).to(tl.float64)
    tl.store(document_NX + n * columns + x_X, carry_X.to(tl.float32), mask=real_X)
