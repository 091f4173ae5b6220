"""The positions of documents and chunks in the flat sequence of B·T tokens that the fast backends process.

A chunk never crosses a document. Shapes: M = B·T tokens, N documents (N = B unless packed), K chunks.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Documents split into chunks of at most `chunk_tokens` tokens, in time order."""

    chunk_tokens: int
    offsets: tuple[int, ...]
    """Document n is tokens offsets[n] to offsets[n + 1], [N + 1]."""
    start_K: Tensor
    """First token of each chunk, int64."""
    end_K: Tensor
    """One past the last token of each chunk, int64."""
    document_K: Tensor
    """Document of each chunk, int64, ascending."""
    first_chunk_N1: Tensor
    """Chunks of document n are first_chunk_N1[n] to first_chunk_N1[n + 1], int64."""
    tokens_N: Tensor
    """Length of each document, int64."""

    @property
    def documents(self) -> int:
        return len(self.offsets) - 1


@lru_cache(maxsize=32)
def document_layout(offsets: tuple[int, ...], chunk_tokens: int, device: torch.device) -> Layout:
    """The layout of documents at `offsets`, cached for each batch shape."""
    offsets_N1 = torch.tensor(offsets)
    chunks_N = (offsets_N1.diff() + chunk_tokens - 1) // chunk_tokens
    first_chunk_N1 = torch.cat([chunks_N.new_zeros(1), chunks_N.cumsum(0)])
    document_K = torch.repeat_interleave(chunks_N)
    index_in_document_K = torch.arange(len(document_K)) - first_chunk_N1[document_K]
    start_K = offsets_N1[document_K] + index_in_document_K * chunk_tokens
    end_K = torch.minimum(start_K + chunk_tokens, offsets_N1[document_K + 1])
    tensors = (x.to(device) for x in (start_K, end_K, document_K, first_chunk_N1, offsets_N1.diff()))
    return Layout(chunk_tokens, offsets, *tensors)


@lru_cache(maxsize=128)
def int64_tensor(values: tuple[int, ...], device: torch.device) -> Tensor:
    """`values` on the device, cached: a copy from the host waits until the device has finished its queue."""
    with torch.inference_mode(False):  # else autograd could not save it later
        return torch.tensor(values, device=device)


def read_offsets(cu_seqlens: Tensor, B: int, T: int) -> tuple[int, ...]:
    """The offsets of documents packed into one row, as Python integers. Synchronizes with the device of `cu_seqlens`.

    Raises:
        ValueError: they do not split [1, T] into documents.
    """
    if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens must be integers [N + 1], N ≥ 1, got {cu_seqlens.dtype} {list(cu_seqlens.shape)}")
    offsets = tuple(cu_seqlens.tolist())
    rising = all(start < end for start, end in pairwise(offsets))
    if B != 1 or offsets[0] != 0 or offsets[-1] != T or not rising:
        raise ValueError(
            f"cu_seqlens must rise from 0 to T = {T} with B == 1 and no empty document, got "
            f"{offsets[0]} … {offsets[-1]} for B = {B}"
        )
    return offsets
