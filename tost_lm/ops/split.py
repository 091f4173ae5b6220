"""How the tokens of a sequence lie on ranks, and which parts of documents a rank holds.

The one layout that loader, positions, labels and sums over time share: contiguous shards in the order of ranks. Host
integers only, the same on every rank, so that no boundary has to be sent.
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

from torch import Tensor

from tost_lm.ops.layout import read_offsets

Array = TypeVar("Array")
"""torch.Tensor or numpy.ndarray."""


@dataclass(frozen=True)
class SequenceSplit:
    """One contiguous shard of every sequence on each rank."""

    lengths: tuple[int, ...]
    """Tokens of each rank's shard."""
    rank: int

    @classmethod
    def even(cls, tokens: int, ranks: int, rank: int) -> "SequenceSplit":
        """Shards that differ by one token at most, the longer ones first."""
        return cls(tuple(tokens // ranks + (r < tokens % ranks) for r in range(ranks)), rank)

    @property
    def tokens(self) -> int:
        """Of the whole sequence."""
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


@dataclass(frozen=True)
class Pieces:
    """The parts of documents on this rank; all of every document unless the sequence is split.

    n documents have tokens here, of N in the whole sequences.
    """

    packed: bool
    offsets: tuple[int, ...]
    """Of the pieces in the flat tokens of this rank, [n + 1]."""
    documents: slice
    """The n among the N."""
    before: tuple[int, ...]
    """Tokens of each document on earlier ranks, [n]."""
    whole_lengths: tuple[int, ...]
    """Tokens of each document on all ranks, [N]."""
    earlier_ranks: range
    """Those that hold earlier tokens of the first document here (unpacked: of all)."""
    later_ranks: range
    """Those that hold later tokens of the last document here (unpacked: of all)."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each piece, [n]."""
        return tuple(end - start for start, end in pairwise(self.offsets))

    @classmethod
    def of(cls, cu_seqlens: Tensor | None, B: int, T: int, split: SequenceSplit | None) -> "Pieces":
        """Pieces in the tokens [B, T] of this rank. `cu_seqlens` cuts the whole sequence; None: a row is a document.

        Raises:
            ValueError: T is not what `split` says, or cu_seqlens does not fit the sequence.
        """
        split = split or SequenceSplit((T,), 0)
        if split.lengths[split.rank] != T:
            raise ValueError(
                f"this rank, number {split.rank} of the sequence, was given {T} tokens where its shard is "
                f"{split.lengths[split.rank]}: shard sequences as the group agreed, in {list(split.lengths)} tokens"
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
