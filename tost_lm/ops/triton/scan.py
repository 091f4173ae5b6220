"""Sums of chunks → sums over each document's earlier (or later) chunks."""
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from tost_lm.ops.layout import Layout
from tost_lm.ops.phases import Sums

CHUNKS = 128
"""Chunks that a step of the scan takes; a document of 1M tokens is 256 steps."""
COLUMNS = 16


def sums(part: Tensor, layout: Layout, reverse: bool = False) -> Sums:
    """Scan `part` [K, …], the sum of each chunk; `reverse` sums over later chunks instead of earlier ones."""
    chunk = torch.empty_like(part)
    document = part.new_empty(layout.documents, *part.shape[1:])
    columns = part[0].numel()
    blocks = triton.cdiv(columns, COLUMNS)
    with torch.cuda.device_of(part):
        scan_kernel[(layout.documents * blocks,)](
            part, chunk, document, layout.first_chunk_N1, columns, blocks, reverse, CHUNKS, COLUMNS, num_warps=4
        )
    return Sums(chunk, document)


@triton.jit
def scan_kernel(
    part_KX, chunk_KX, document_NX, first_chunk_N1, columns, blocks,
    REVERSE: tl.constexpr, K_: tl.constexpr, X_: tl.constexpr,
):  # fmt: skip
    """A block of columns of one document. It touches no other document's chunks: nothing leaks, not even a NaN."""
    n = (tl.program_id(0) // blocks).to(tl.int64)
    x_X = tl.program_id(0) % blocks * X_ + tl.arange(0, X_)
    real_X = x_X < columns
    first = tl.load(first_chunk_N1 + n)
    chunks = tl.load(first_chunk_N1 + n + 1) - first
    step = -1 if REVERSE else 1
    origin = first + chunks - 1 if REVERSE else first
    carry_X = tl.zeros((X_,), tl.float64)  # many steps in float32 would drift
    tl.store(chunk_KX + origin * columns + x_X, carry_X.to(tl.float32), mask=real_X & (chunks > 0))
    for i in range(0, chunks, K_):
        i_K = i + tl.arange(0, K_)
        places_KX = (origin + step * i_K)[:, None] * columns + x_X[None, :]
        part_of_step_KX = tl.load(part_KX + places_KX, mask=(i_K < chunks)[:, None] & real_X[None, :], other=0.0)
        sum_KX = carry_X[None, :] + tl.cumsum(part_of_step_KX, axis=0).to(tl.float64)
        # Stored one chunk on, where it is the sum over the chunks before: subtracting a chunk's own sum would cancel.
        has_next_K = i_K + 1 < chunks
        next_KX = places_KX + step * columns
        tl.store(chunk_KX + next_KX, sum_KX.to(tl.float32), mask=has_next_K[:, None] & real_X[None, :])
        carry_X += tl.sum(part_of_step_KX, axis=0).to(tl.float64)
    tl.store(document_NX + n * columns + x_X, carry_X.to(tl.float32), mask=real_X)
