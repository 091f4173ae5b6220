"""The positions of documents and chunks in the flat sequence of B·T tokens that the fast backends process; and the
sequence shards of ranks, with the documents that each shard contains tokens of.

A chunk never crosses a document. Loader, positions, labels and sums over time use one layout: contiguous shards in rank
order. All values are host integers, equal on every rank, so ranks never exchange document boundaries.

Shapes: M = B·T tokens, N documents (N = B unless packed), K chunks.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, wraps
from itertools import accumulate, pairwise
from typing import Any, ParamSpec, Protocol, TypeVar

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
    tensors = start_K, end_K, document_K, first_chunk_N1
    # One copy. Each tensor starts at a multiple of 16 bytes: at other addresses, Triton compiles its kernels again.
    joined = torch.cat([part for x in tensors for part in (x, x[: len(x) % 2])])
    parts = to_device(joined, device).split([size for x in tensors for size in (len(x), len(x) % 2)])
    return Layout(chunk_tokens, offsets, *parts[::2])


@cached_on_device(maxsize=128)
def int64_tensor(values: tuple[int, ...], device: torch.device) -> Tensor:
    """`values` on the device, cached."""
    return to_device(torch.tensor(values), device)


FLA_CHUNK_TOKENS = 64
"""Tokens of a chunk of fla-core's kernels; the last chunk of a document may have fewer."""


@cached_on_device(maxsize=32)
def fla_documents(offsets: tuple[int, ...], device: torch.device) -> dict[str, Tensor]:
    """Arguments of fla-core's kernels for documents at `offsets`. It would itself copy `chunk_indices`, the document of
    each chunk and the chunk's number in it, and wait for the device."""
    layout = document_layout(offsets, FLA_CHUNK_TOKENS, torch.device("cpu"))
    number_K = torch.arange(len(layout.document_K)) - layout.first_chunk_N1[layout.document_K]
    indices_K2 = torch.stack([layout.document_K, number_K], 1)
    return {"cu_seqlens": int64_tensor(offsets, device), "chunk_indices": to_device(indices_K2, device)}


Array = TypeVar("Array")
"""torch.Tensor or numpy.ndarray."""


@dataclass(frozen=True)
class SequenceSplit:
    """One contiguous shard of each sequence on each rank."""

    lengths: tuple[int, ...]
    """Tokens of each rank's shard."""
    rank: int

    @classmethod
    def even(cls, tokens: int, ranks: int, rank: int) -> "SequenceSplit":
        """Shards whose lengths differ by at most one token, longer shards first."""
        return cls(tuple(tokens // ranks + (r < tokens % ranks) for r in range(ranks)), rank)

    @property
    def tokens(self) -> int:
        """Tokens of the whole sequence."""
        return sum(self.lengths)

    @property
    def start(self) -> int:
        return sum(self.lengths[: self.rank])

    @property
    def end(self) -> int:
        return self.start + self.lengths[self.rank]

    def shard(self, x_BT: Array) -> Array:
        """The columns of this rank."""
        return x_BT[:, self.start : self.end]  # pyright: ignore[reportIndexIssue]


@dataclass(frozen=True)
class LocalDocuments:
    """The n documents with tokens on this rank, of the N documents of the whole sequences."""

    packed: bool
    offsets: tuple[int, ...]
    """Boundaries of the documents in the flat tokens of this rank, [n + 1]."""
    documents: slice
    """The n of the N."""
    before: tuple[int, ...]
    """Tokens of each document on earlier ranks, [n]."""
    whole_lengths: tuple[int, ...]
    """Tokens of each document over all ranks, [N]."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document on this rank, [n]."""
        return tuple(end - start for start, end in pairwise(self.offsets))

    @property
    def after(self) -> tuple[int, ...]:
        """Tokens of each document on later ranks, [n]."""
        of_documents = zip(self.whole_lengths[self.documents], self.before, self.lengths, strict=True)
        return tuple(whole - before - here for whole, before, here in of_documents)

    @classmethod
    def of(cls, cu_seqlens: Tensor | None, B: int, T: int, split: SequenceSplit | None) -> "LocalDocuments":
        """The documents of this rank's tokens [B, T]. `cu_seqlens` covers the whole sequence; None: rows are documents.
        Synchronizes with its device.

        Raises:
            ValueError: T differs from `split`, or cu_seqlens does not fit the sequence.
        """
        split = split or SequenceSplit((T,), 0)
        if split.lengths[split.rank] != T:
            raise ValueError(
                f"sequence rank {split.rank} got {T} tokens, but its shard has {split.lengths[split.rank]}; split "
                f"sequences into shards of {list(split.lengths)} tokens"
            )
        if cu_seqlens is None:
            return cls(
                packed=False,
                offsets=tuple(range(0, B * T + 1, T)),
                documents=slice(0, B),
                before=(split.start,) * B,
                whole_lengths=(split.tokens,) * B,
            )
        if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or len(cu_seqlens) < 2:
            shape = list(cu_seqlens.shape)
            raise ValueError(f"cu_seqlens must be integers [N + 1], N ≥ 1, got {cu_seqlens.dtype} {shape}")
        return _packed(tuple(cu_seqlens.tolist()), B, split)


@lru_cache(maxsize=32)
def _packed(offsets: tuple[int, ...], B: int, split: SequenceSplit) -> LocalDocuments:
    """The documents at `offsets` of one row, cached: every TSSA layer asks for them."""
    rising = all(start < end for start, end in pairwise(offsets))
    if B != 1 or offsets[0] != 0 or offsets[-1] != split.tokens or not rising:
        raise ValueError(
            f"cu_seqlens must rise from 0 to T = {split.tokens} with B == 1 and no empty document, got "
            f"{offsets[0]} … {offsets[-1]} for B = {B}"
        )
    first = bisect_right(offsets, split.start) - 1
    last = bisect_right(offsets, split.end - 1) - 1
    inner = offsets[first + 1 : last + 1]
    return LocalDocuments(
        packed=True,
        offsets=tuple(x - split.start for x in (split.start, *inner, split.end)),
        documents=slice(first, last + 1),
        before=(split.start - offsets[first], *(0 for _ in inner)),
        whole_lengths=tuple(end - start for start, end in pairwise(offsets)),
    )


def documents_begin(lengths: tuple[int, ...], documents: tuple[int, ...]) -> tuple[bool, ...]:
    """Whether a document begins on each rank of a sequence: then its last one does, which the next rank continues.

    Args:
        lengths: tokens of each rank.
        documents: tokens of each document.
    """
    borders, starts = [0, *accumulate(lengths)], [0, *accumulate(documents)][:-1]
    return tuple(any(first <= start < end for start in starts) for first, end in pairwise(borders))


@dataclass(frozen=True)
class Dealt:
    """The heads and tokens that each rank computes with, of a tensor [B, H, T, D] whose tokens are split over ranks."""

    heads: tuple[slice, ...]
    """By rank."""
    tokens: tuple[tuple[slice, ...], ...]
    """By rank, in rising order."""

    def held(self, lengths: tuple[int, ...], rank: int, holder: int) -> list[slice]:
        """Of the tokens that `rank` computes with, those of another rank, in its shard."""
        start, end = sum(lengths[:holder]), sum(lengths[: holder + 1])
        common = [(max(one.start, start), min(one.stop, end)) for one in self.tokens[rank]]
        return [slice(first - start, last - start) for first, last in common if first < last]

    def shape(self, lengths: tuple[int, ...], rank: int, holder: int) -> tuple[int, int]:
        """The number of heads that `rank` computes with, and that of the tokens of them that another rank holds."""
        heads = self.heads[rank]
        return heads.stop - heads.start, sum(one.stop - one.start for one in self.held(lengths, rank, holder))


class SequenceShard(Protocol):
    """Communication with the ranks that hold the other tokens of the same sequences."""

    @property
    def split(self) -> SequenceSplit: ...

    @property
    def groups(self) -> tuple[range, ...]:
        """All ranks, in groups of neighbours: one group, or about √R of many ranks."""
        ...

    def exchange_rows(self, row: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """A function of the rows of all R ranks, column by column, in one exchange. Not differentiable.

        Args:
            row: of this rank, […, C]; one shape on all ranks.
            function: called with some columns of the rows of all ranks, [R, …, c]. Returns the result of each rank in
                these columns, [R, …, c]; other sizes than those of `row` are possible.

        Returns:
            The result of this rank, […, C]. What `function` returns for all ranks alike has the same bits on all.
        """
        ...

    def gather_group(self, x: Tensor) -> Tensor:
        """x, of one shape on all ranks, of each rank of this rank's group, [ranks, …]. Not differentiable."""
        ...

    def gather_groups(self, x: Tensor) -> Tensor:
        """x, equal on all ranks of a group, of each group, [groups, …]. Not differentiable."""
        ...

    def gather(self, x_BHTD: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
        """x of every rank in rank order, differentiable. `lengths` are its tokens on each rank; None: whole shards."""
        ...

    def deal(self, parts: Sequence[Dealt], *xs_BHTD: Tensor) -> tuple[Tensor, ...]:
        """What this rank computes with of each x, [B, h, t, D], from all ranks; differentiable. The gradients of heads
        and tokens that several ranks compute with are summed."""
        ...

    def collect(self, part: Dealt, y_BhtD: Tensor, heads: int) -> Tensor:
        """The reverse: [B, H, T, D] of this rank's tokens, `heads` heads, from what all ranks computed; differentiable.
        Each head of a token is on one rank."""
        ...
