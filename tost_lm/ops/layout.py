"""The positions of documents and chunks in the flat sequence of B·T tokens that the fast backends process.

A chunk never crosses a document. Shapes: M = B·T tokens, N documents (N = B unless packed), K chunks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, wraps
from itertools import pairwise
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


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

    @cached_property
    def longest(self) -> int:
        """Chunks of the longest document."""
        return -(-max(end - start for start, end in pairwise(self.offsets)) // self.chunk_tokens)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device, without waiting for it. A copy to a GPU from memory that is not pinned waits
    until the GPU has finished its queue."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def cached_on_device(maxsize: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Cache a function whose last argument is the device that it copies to.

    A stream of a GPU has results of its own: only there is the copy in the queue before its uses.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @lru_cache(maxsize)
        def in_stream(_stream: torch.cuda.Stream | None, *arguments: Any) -> R:
            with torch.inference_mode(False):  # else autograd could not save it later
                return function(*arguments)  # pyright: ignore[reportCallIssue]

        @wraps(function)
        def call(*arguments: Any) -> R:
            device = arguments[-1]
            return in_stream(torch.cuda.current_stream(device) if device.type == "cuda" else None, *arguments)

        return call  # pyright: ignore[reportReturnType]

    return decorate


@cached_on_device(maxsize=32)
def document_layout(offsets: tuple[int, ...], chunk_tokens: int, device: torch.device) -> Layout:
    """The layout of documents at `offsets`, cached for each batch shape."""
    offsets_N1 = torch.tensor(offsets)
    chunks_N = (offsets_N1.diff() + chunk_tokens - 1) // chunk_tokens
    first_chunk_N1 = torch.cat([chunks_N.new_zeros(1), chunks_N.cumsum(0)])
    document_K = torch.repeat_interleave(chunks_N)
    index_in_document_K = torch.arange(len(document_K)) - first_chunk_N1[document_K]
    start_K = offsets_N1[document_K] + index_in_document_K * chunk_tokens
    end_K = torch.minimum(start_K + chunk_tokens, offsets_N1[document_K + 1])
    tensors = start_K, end_K, document_K, first_chunk_N1, offsets_N1.diff()
    # One copy. Each tensor starts at a multiple of 16 bytes: at other addresses, Triton compiles its kernels again.
    joined = torch.cat([part for x in tensors for part in (x, x[: len(x) % 2])])
    parts = to_device(joined, device).split([size for x in tensors for size in (len(x), len(x) % 2)])
    return Layout(chunk_tokens, offsets, *parts[::2])


@cached_on_device(maxsize=128)
def int64_tensor(values: tuple[int, ...], device: torch.device) -> Tensor:
    """`values` on the device, cached."""
    return to_device(torch.tensor(values), device)


def read_offsets(cu_seqlens: Tensor) -> tuple[int, ...]:
    """The offsets of packed documents as Python integers. Synchronizes with the device of `cu_seqlens`.

    Raises:
        ValueError: they are no offsets.
    """
    if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens must be integers [N + 1], N ≥ 1, got {cu_seqlens.dtype} {list(cu_seqlens.shape)}")
    return tuple(cu_seqlens.tolist())
