"""The sequence shards of ranks, and the documents that each shard contains tokens of.

Loader, positions, labels and sums over time use this one layout: contiguous shards in rank order. All values are host
integers, equal on every rank, so ranks never exchange document boundaries.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
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

    def rank_of(self, token: int) -> int:
        return bisect_right(list(accumulate(self.lengths)), token)

    def tokens_of(self, local: "LocalDocuments") -> list[list[int]]:
        """Tokens of each document on each rank, [R][N]."""
        if not local.packed:
            return [[length] * len(local.whole_lengths) for length in self.lengths]
        ends = list(accumulate(self.lengths))
        offsets = [0, *accumulate(local.whole_lengths)]
        return [
            [max(0, min(end, last) - max(end - length, first)) for first, last in pairwise(offsets)]
            for end, length in zip(ends, self.lengths, strict=True)
        ]


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
    earlier_ranks: range
    """Ranks that hold earlier tokens of the first document here (unpacked: of all documents)."""
    later_ranks: range
    """Ranks that hold later tokens of the last document here (unpacked: of all documents)."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document on this rank, [n]."""
        return tuple(end - start for start, end in pairwise(self.offsets))

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
                earlier_ranks=range(split.rank),
                later_ranks=range(split.rank + 1, len(split.lengths)),
            )
        offsets = read_offsets(cu_seqlens, B, split.tokens)
        first = bisect_right(offsets, split.start) - 1
        last = bisect_right(offsets, split.end - 1) - 1
        inner = offsets[first + 1 : last + 1]
        return cls(
            packed=True,
            offsets=tuple(x - split.start for x in (split.start, *inner, split.end)),
            documents=slice(first, last + 1),
            before=(split.start - offsets[first], *(0 for _ in inner)),
            whole_lengths=tuple(end - start for start, end in pairwise(offsets)),
            earlier_ranks=range(split.rank_of(offsets[first]), split.rank),
            later_ranks=range(split.rank + 1, split.rank_of(offsets[last + 1] - 1) + 1),
        )


class SequenceShard(Protocol):
    """Communication with the ranks that hold the other tokens of the same sequences."""

    @property
    def split(self) -> SequenceSplit: ...

    def exclusive_scan(
        self,
        local: LocalDocuments,
        outside_N: Sequence[Tensor],
        here_n: Sequence[Tensor],
        *,
        reverse: bool,
        per_document: bool,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Sum over the tokens of earlier ranks (with `reverse`: of later ranks), in one exchange.

        Args:
            local: the documents of this rank.
            outside_N: the sum before the sequence (with `reverse`: after it), a row for each of its N documents.
            here_n: sums over the tokens of this rank, a row for each of its n documents.
            reverse: scan from the last token to the first.
            per_document: every rank needs the total of every document. Otherwise ranks exchange only the documents
                that cross ranks, and `outside_N` is 0.

        Returns:
            For each of the n documents, the sum before (with `reverse`: after) its tokens on this rank. For each of the
            N, `outside_N` plus the sum over all its tokens (without `per_document`: `outside_N` unchanged).
        """
        ...

    def gather(self, x_BHTD: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
        """x of every rank in rank order, differentiable. `lengths` are its tokens on each rank; None: whole shards."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """x, of one shape on all ranks, of every rank: [R, …]. Not differentiable."""
        ...
