"""Positions of tokens in their documents, and rotary embeddings."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from tost_lm.ops.layout import LocalDocuments, SequenceShard, to_device
from tost_lm.ops.rotary import Rotary

SLOW_TURNS, FAST_TURNS = 1, 4
"""Llama 3's scaling changes frequencies of at most FAST_TURNS turns in the original length, fully up to SLOW_TURNS."""
FIRST_BIN = 8


@dataclass(frozen=True)
class SequenceInfo:
    """Documents and positions of the tokens of one call, computed once for all layers.

    n documents have tokens on this rank, of the N documents of the whole sequences.
    """

    start_positions: tuple[int, ...]
    """Tokens of each document before this call, [N]; empty in a step (`of_step`)."""
    local: LocalDocuments
    """The documents of this rank's tokens."""
    cu_seqlens: Tensor | None
    """Offsets of the packed documents in the whole sequence, [N + 1], on the host; None: each row is a document."""
    position: Tensor
    """Position of each of this rank's tokens in its document, int64: [T] if all rows are equal, else [B, T]."""
    shard: SequenceShard | None = None
    """None: all tokens of the sequences are on this rank."""
    output_state: bool | Literal["last"] = True
    """Whether to return the state after the last token: of all documents, or (`last`) of each row's last one."""
    rotary: tuple[Tensor, Tensor] | None = None
    """Cosine and sine of the rotary embedding at each position, each [T, D/2] or [B, 1, T, D/2]; None: not used."""
    recurrent: bool = False
    """One token of each document, none of them on another rank: layers with a state use their recurrent form."""
    reported: dict[str, Tensor] = field(default_factory=dict)
    """What layers have reported in this call."""

    def report(self, name: str, total: Tensor) -> None:
        """Let training log a number per label, summed over layers.

        Args:
            total: without dimensions, the sum over this rank's tokens, and with tensor ranks the mean over its heads.
        """
        total = total.detach()
        self.reported[name] = self.reported[name] + total if name in self.reported else total

    @classmethod
    def of(
        cls,
        tokens_BT: Tensor,
        start_positions: Sequence[int] | None,
        cu_seqlens: Tensor | None,
        shard: SequenceShard | None = None,
        output_state: bool | Literal["last"] = True,
    ) -> "SequenceInfo":
        """SequenceInfo of tokens from `start_positions` on (None: 0 for all documents), without a rotary embedding.

        A single start position for several packed documents is that of the first; the others start at 0.

        Raises:
            ValueError: cu_seqlens or the shard does not fit the tokens, or start_positions the documents.
        """
        (B, T), device = tokens_BT.shape, tokens_BT.device
        if not B * T:
            raise ValueError(f"tokens must be [B, T] with B, T ≥ 1, got {[B, T]}")
        if cu_seqlens is not None:
            cu_seqlens = torch.tensor(cu_seqlens.tolist())  # on the host, where every layer reads them without waiting
        local = LocalDocuments.of(cu_seqlens, B, T, shard.split if shard else None)
        documents = len(local.whole_lengths)
        starts = tuple(start_positions or (0,) * documents)
        if cu_seqlens is not None and len(starts) == 1:
            starts += (0,) * (documents - 1)
        if len(starts) != documents:
            raise ValueError(f"state holds {len(starts)} rows, the input {documents}; give a row for each document")
        first_n = [start + before for start, before in zip(starts[local.documents], local.before, strict=True)]
        if cu_seqlens is not None:
            ahead_n = torch.tensor(first_n) - torch.tensor(local.offsets[:-1])
            position = to_device(torch.arange(T) + ahead_n.repeat_interleave(torch.tensor(local.lengths)), device)
        elif len(set(first_n)) == 1:
            position = torch.arange(first_n[0], first_n[0] + T, device=device)
        else:
            position = to_device(torch.tensor(first_n)[:, None] + torch.arange(T), device)
        recurrent = max(local.lengths) == 1 and shard is None
        return cls(starts, local, cu_seqlens, position, shard, output_state, recurrent=recurrent)

    @classmethod
    def of_step(cls, position_B: Tensor) -> "SequenceInfo":
        """SequenceInfo of one token of each row, at positions that are on the device only: no number of the host
        changes between steps."""
        local = LocalDocuments.of(None, len(position_B), 1, None)
        return cls((), local, None, position_B[:, None], recurrent=True)

    def with_rotary(self, rotary: Rotary | None, dtype: torch.dtype) -> "SequenceInfo":
        """With the angles that `rotary_cos_sin` computes; None: without any."""
        return self if rotary is None else replace(self, rotary=rotary_cos_sin(self.position, rotary, dtype))

    @property
    def end_positions(self) -> tuple[int, ...]:
        """Tokens of each document after this call, [N]."""
        lengths = self.local.whole_lengths
        return tuple(start + length for start, length in zip(self.start_positions, lengths, strict=True))

    def pad_rows(self, state_N: Tensor | None) -> Tensor | None:
        """A tensor of a state, with rows of zeros for the documents that start in this call."""
        documents = len(self.local.whole_lengths)
        if state_N is None or len(state_N) == documents:
            return state_N
        return pad(state_N, (0, 0) * (state_N.dim() - 1) + (0, documents - len(state_N)))

    def select_rows(self, state_N: Tensor) -> Tensor:
        """The rows that `output_state` requests, of a tensor of the state after this call."""
        return state_N[-1:] if self.output_state == "last" and self.cu_seqlens is not None else state_N


def position_ends(tokens: int) -> list[int]:
    """The ends (exclusive) of the bins of positions that results are reported for: 8, 16, 32, …, `tokens`."""
    ends = [FIRST_BIN]
    while ends[-1] * 2 < tokens:
        ends.append(ends[-1] * 2)
    return [end for end in ends if end < tokens] + [tokens]


def rotary_cos_sin(position: Tensor, rotary: Rotary, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary embedding of D channels of a head, each [T, D/2] or [B, 1, T, D/2].

    float64 for a float64 `dtype`, else float32. Angles are float64: at position 10⁶, float32 has errors of up to 0.03
    radians. mps has no float64.
    """
    position = position if position.dim() == 1 else position[:, None]
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    angle_dtype = torch.float32 if position.device.type == "mps" else torch.float64
    pairs = rotary.channels // 2
    pair = torch.arange(pairs, device=position.device, dtype=angle_dtype)
    frequency = rotary.theta ** -(pair / pairs)
    if rotary.factor != 1:
        kept = _kept(rotary, pair, frequency)
        frequency = frequency * (kept + (1 - kept) / rotary.factor)
    angles = position[..., None] * frequency
    return (angles.cos() * rotary.amplitude).to(dtype), (angles.sin() * rotary.amplitude).to(dtype)


def apply_rotary(x_BHTD: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding (arXiv 2104.09864) of channel pairs (d, d + R/2) of the first R, in x's dtype."""
    cos, sin = rotary
    rotated = 2 * cos.shape[-1]
    first, second = x_BHTD[..., :rotated].to(cos.dtype).chunk(2, -1)
    y_BHTR = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x_BHTD.dtype)
    return y_BHTR if rotated == x_BHTD.shape[-1] else torch.cat([y_BHTR, x_BHTD[..., rotated:]], -1)


def _kept(rotary: Rotary, pair: Tensor, frequency: Tensor) -> Tensor | float:
    """The fraction of each frequency that a scaling keeps; it divides the rest by its factor."""
    if rotary.scaling == "llama3":
        turns = frequency * rotary.original_length / (2 * math.pi)
        return ((turns - SLOW_TURNS) / (FAST_TURNS - SLOW_TURNS)).clamp(0, 1)
    if rotary.scaling == "yarn":
        kept, slowed = rotary.yarn_pairs
        return 1 - ((pair - kept) / (slowed - kept)).clamp(0, 1)
    return 0.0
