"""The sequence shards of ranks, and the documents that each shard contains tokens of.

Loader, positions, labels and sums over time use this one layout: contiguous shards in rank order. All values are host
integers, equal on every rank, so ranks never exchange document boundaries.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Protocol, TypeVar

from torch import Tensor

from tost_lm.ops.layout import read_offsets

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
        return _packed(read_offsets(cu_seqlens), B, split)


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


class SequenceShard(Protocol):
    """Communication with the ranks that hold the other tokens of the same sequences."""

    @property
    def split(self) -> SequenceSplit: ...

    def exchange_rows(self, row: Tensor, function: Callable[[Tensor, slice], Tensor]) -> Tensor:
        """A function of the rows of all R ranks, column by column, in one exchange. Not differentiable.

        Args:
            row: of this rank, […, C]; one shape on all ranks.
            function: called with some columns of the rows of all ranks, [R, …, c], and the slice of C that these are.
                Returns the result of each rank in these columns, [R, …, c]; other sizes than those of `row` are
                possible.

        Returns:
            The result of this rank, […, C]. What `function` returns for all ranks alike has the same bits on all.
        """
        ...

    def gather(self, x_BHTD: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
        """x of every rank in rank order, differentiable. `lengths` are its tokens on each rank; None: whole shards."""
        ...
