"""Where tokens stand in their documents, and what is computed from that: sinusoidal and rotary embeddings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from tost_lm.ops.phases import SequenceShard
from tost_lm.ops.split import Pieces

SINUSOIDAL_BASE = 10000.0
FIRST_END = 8

Sums = TypeVar("Sums", bound=tuple[Any, ...])
"""A layer's state in a named tuple of tensors, [N, …] each."""


@dataclass(frozen=True)
class Places:
    """Where the tokens of one call stand; made once and read by every layer.

    n documents have tokens on this rank, of N in the whole sequences; all of them unless sequences are split.
    """

    starts: tuple[int, ...]
    """Tokens of each document before this call, [N]."""
    pieces: Pieces
    """The parts of documents that are here."""
    cu_seqlens: Tensor | None
    """Offsets of the packed documents in the whole sequence, [N + 1], on the host; None: each row is a document."""
    position: Tensor
    """Of each token here in its document, int64: [T] if all rows are alike, else [B, T]."""
    shard: SequenceShard | None = None
    """The tokens here among those of whole sequences; None: they are all here."""
    output_state: bool | Literal["last"] = True
    """Whether the state after the last token is wanted, of all documents or of the last of packed ones."""
    turn: tuple[Tensor, Tensor] | None = None
    """Cosine and sine of the rotary embedding at each position, each [T, D/2] or [B, 1, T, D/2]; None: there is no
    such embedding."""

    @classmethod
    def of(
        cls,
        tokens_BT: Tensor,
        starts: Sequence[int] | None,
        cu_seqlens: Tensor | None,
        shard: SequenceShard | None = None,
        output_state: bool | Literal["last"] = True,
    ) -> "Places":
        """Places of tokens that go on from `starts` (None: documents begin), without a rotary embedding.

        One start for several packed documents is that of the first, the others begin.

        Raises:
            ValueError: cu_seqlens or the shard does not fit the tokens, or `starts` not the documents.
        """
        B, T = tokens_BT.shape
        if not B * T:
            raise ValueError(f"tokens must be [B, T] with B, T ≥ 1, got {[B, T]}")
        if cu_seqlens is not None:
            cu_seqlens = torch.tensor(cu_seqlens.tolist())  # on the host, where every layer reads them without waiting
        pieces = Pieces.of(cu_seqlens, B, T, shard.split if shard else None)
        documents = len(pieces.whole_lengths)
        starts = tuple(starts or (0,) * documents)
        if cu_seqlens is not None and len(starts) == 1:
            starts += (0,) * (documents - 1)
        if len(starts) != documents:
            raise ValueError(f"state holds {len(starts)} rows, the input {documents}: give a row for each document")
        first_n = [start + before for start, before in zip(starts[pieces.documents], pieces.before, strict=True)]
        if cu_seqlens is not None:
            position = torch.cat([torch.arange(s, s + n) for s, n in zip(first_n, pieces.lengths, strict=True)])
        elif len(set(first_n)) == 1:
            position = torch.arange(first_n[0], first_n[0] + T, device=tokens_BT.device)
        else:
            position = torch.tensor(first_n)[:, None] + torch.arange(T)
        return cls(starts, pieces, cu_seqlens, position.to(tokens_BT.device), shard, output_state)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document here, [n]; all T unless packed."""
        return self.pieces.lengths

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens of each document after this call, [N]."""
        return tuple(start + length for start, length in zip(self.starts, self.pieces.whole_lengths, strict=True))

    def with_all_documents(self, state: Sums | None) -> Sums | None:
        """With empty rows, which are zero, for the documents that begin."""
        if state is None or len(state[0]) == len(self.starts):
            return state
        begin = len(self.starts) - len(state[0])
        return type(state)(*(pad(x_N, (0, 0) * (x_N.dim() - 1) + (0, begin)) for x_N in state))

    def wanted(self, state: Sums) -> Sums:
        """The rows of `output_state`, of a state after this call."""
        return type(state)(*(x_N[-1:] for x_N in state)) if self.output_state == "last" else state


def position_ends(tokens: int) -> list[int]:
    """8, 16, 32, …, `tokens`: where stretches of positions end that things are told of, each before its number."""
    ends = [FIRST_END]
    while ends[-1] * 2 < tokens:
        ends.append(ends[-1] * 2)
    return [end for end in ends if end < tokens] + [tokens]


def sinusoidal(position: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Sines and cosines of each position, […, width]; mean square 1 over channels."""
    cos, sin = _circle(position, (width + 1) // 2, SINUSOIDAL_BASE, dtype)
    return 2**0.5 * torch.cat([sin, cos], -1)[..., :width]


def rotation(position: Tensor, channels: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine by which each position turns the channels/2 pairs of a head, each [T, D/2] or [B, 1, T, D/2].

    In float64 for a float64 `dtype`, else in float32.
    """
    position = position if position.dim() == 1 else position[:, None]
    return _circle(position, channels // 2, theta, torch.float64 if dtype == torch.float64 else torch.float32)


def rotate(x_BHTD: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding (arXiv 2104.09864), channel d paired with d + D/2; in x's dtype."""
    cos, sin = turn
    first, second = x_BHTD.to(cos.dtype).chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x_BHTD.dtype)


def _circle(position: Tensor, frequencies: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position · base^(−i / frequencies), each […, frequencies].

    The angle is float64: at position 10⁶ a float32 one is wrong by up to 0.03 radians. mps has no float64.
    """
    angle_dtype = torch.float32 if position.device.type == "mps" else torch.float64
    exponents = torch.arange(frequencies, device=position.device, dtype=angle_dtype) / frequencies
    angles = position[..., None] * base**-exponents
    return angles.cos().to(dtype), angles.sin().to(dtype)
