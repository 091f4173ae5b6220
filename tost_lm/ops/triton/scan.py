"""Scan: from the sum of each chunk to the sum over each document's earlier (or later) chunks."""
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from tost_lm.ops.layout import Layout
from tost_lm.ops.phases import Sums

NARROW, WIDE = (128, 16, 4), (512, 8, 8)
"""Chunks and columns in a step of the scan, and warps. A document of 1M tokens has 64 wide steps, one after another."""


def sums(sum_K: Tensor, layout: Layout, reverse: bool = False) -> Sums:
    """Scan `sum_K` [K, …], the sum of each chunk; `reverse` sums over later chunks instead of earlier ones."""
    chunk = torch.empty_like(sum_K)
    document = sum_K.new_empty(layout.documents, *sum_K.shape[1:])
    columns = sum_K[0].numel()
    chunks_of_step, columns_of_step, warps = WIDE if layout.longest > NARROW[0] else NARROW
    blocks = triton.cdiv(columns, columns_of_step)
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
