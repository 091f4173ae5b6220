"""Code that the Triton kernels of several mixers share: chunks, loads and stores of tokens, and a fast reciprocal."""

from functools import cache

import triton
import triton.language as tl
from triton import knobs

from tost_lm.ops import precision

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false

MASS_FLOOR = tl.constexpr(precision.MASS_FLOOR)
INTERPRETED = tl.constexpr(knobs.runtime.interpret)
cdiv, next_power_of_2 = cache(triton.cdiv), cache(triton.next_power_of_2)
"""Triton's own take microseconds a call on the host, because kernels can call them too."""


@triton.jit
def chunk_and_part(PARTS: tl.constexpr):
    """This program's chunk, int64, and its part of the chunk. Consecutive programs have the parts of one chunk, so
    together they read whole tokens."""
    program = tl.program_id(0)
    return (program // PARTS).to(tl.int64), program % PARTS


@triton.jit
def tokens_of_chunk(k, start_K, end_K):
    """The chunk's first token, int64, and its number of tokens."""
    start = tl.load(start_K + k)
    return start, (tl.load(end_K + k) - start).to(tl.int32)


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
