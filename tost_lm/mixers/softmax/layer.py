"""The softmax mixer: causal attention, full or in a sliding window, with rotary embedding and a cache for decoding, in
memory linear in T.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from tost_lm.mixers.layer import HeadSoftmax, TokenMixer, room_after
from tost_lm.mixers.softmax.attention import attend, attend_one, causal_attention
from tost_lm.mixers.softmax.balance import attend_balanced
from tost_lm.mixers.softmax.cache import (
    ConvolvedState,
    KeysAndValues,
    KeyValueSlots,
    KeyValueState,
    append,
    halves,
    last,
    last_of_both,
)
from tost_lm.mixers.softmax.earlier_tiles import attend_tile
from tost_lm.mixers.softmax.settings import CONV_TAPS, SoftmaxShape, SoftmaxSizes
from tost_lm.mixers.state import SharedState
from tost_lm.ops.initialization import InitialValue, set_own_constants
from tost_lm.ops.norms import ZeroCenteredRmsNorm
from tost_lm.ops.positions import SequenceInfo, apply_rotary
from tost_lm.ops.precision import statistics_dtype
from tost_lm.ops.short_conv import conv_of

AttentionState = KeyValueState | SharedState | KeyValueSlots


class SoftmaxMixer(TokenMixer):
    State = KeyValueState
    TileState = SharedState
    FIXED_STATE = True

    def __init__(self, shape: SoftmaxShape):
        super().__init__()
        self.heads, self.kv_heads = shape.heads, shape.own.kv_heads or shape.heads
        sizes, of_keys = SoftmaxSizes.of(shape), self.heads // self.kv_heads
        self.head_size, self.gated = sizes.head, shape.own.gate
        self.groups = (of_keys, 1, 1, of_keys) if self.gated else (of_keys, 1, 1)
        """The sizes of q, k, v and the gate."""
        self.window = shape.own.window
        self.in_proj = nn.Linear(shape.width, sizes.projected, bias=shape.bias)
        self.out_proj = nn.Linear(sizes.queries, shape.width, bias=shape.bias)
        self.conv = None
        if shape.own.conv:
            self.State, self.OF_HEADS = ConvolvedState, ("conv",)
            self.conv = nn.Parameter(torch.empty(sizes.keys, CONV_TAPS))
            set_own_constants(self)
        self.norms_heads = shape.own.qk_norm is True
        """Whether the norms of queries and keys are those of each head, not of all of them."""
        self.q_norm, self.k_norm = _qk_norm(shape, sizes.queries), _qk_norm(shape, sizes.keys)

    def initial_values(self) -> dict[str, InitialValue]:
        if self.conv is None:
            return {}
        shift_EK = torch.zeros_like(self.conv, device="cpu")
        shift_EK[:, -2] = 1  # the token before
        return {"conv": shift_EK}

    def is_tile(self, state: Any, info: SequenceInfo) -> bool:
        of_attention = state.attention if isinstance(state, ConvolvedState) else state
        return not self.window and super().is_tile(of_attention, info)

    def split_heads(self, ranks: int, softmax: HeadSoftmax) -> None:
        super().split_heads(ranks, softmax)
        self.kv_heads //= ranks

    def fixed_state(
        self, state: KeyValueState | ConvolvedState, positions: Sequence[int]
    ) -> KeyValueSlots | ConvolvedState:
        if isinstance(state, ConvolvedState):
            slots: Any = self.fixed_state(state.attention, positions)  # pyright: ignore[reportArgumentType]
            return ConvolvedState(slots, state.taps.clone())
        return KeyValueSlots.of(state, positions, room_after(max(positions), self.window or None))

    def forward(self, x_BTC: Tensor, state: Any, info: SequenceInfo) -> tuple[Tensor, Any]:
        """Attend to the earlier tokens of the document (in `state`) and to these."""
        projected_BTE, gate_BTC, before = self.in_proj(x_BTC), None, None
        if self.gated:
            channels = self.head_size * self.heads
            projected_BTE, gate_BTC = projected_BTE.split([projected_BTE.shape[-1] - channels, channels], -1)
        if isinstance(state, ConvolvedState):
            state, before = state
        projected_BTE, taps = self._convolved(projected_BTE, before, info)
        y_BTC, new_state = self._attend(*self.heads_of(projected_BTE, info), state, info)
        if new_state is not None and taps is not None:
            new_state = ConvolvedState(new_state, taps)
        return self.out_proj(y_BTC if gate_BTC is None else y_BTC * gate_BTC.sigmoid()), new_state

    def _convolved(
        self, projected_BTE: Tensor, taps_NPE: Tensor | None, info: SequenceInfo
    ) -> tuple[Tensor, Tensor | None]:
        """Queries, keys and values, whose keys are convolved if the layer does so, and the taps of its new state."""
        if self.conv is None:
            return projected_BTE, None
        queries, keys = self.head_size * self.heads, len(self.conv)
        q, k, v = projected_BTE.split([queries, keys, projected_BTE.shape[-1] - queries - keys], -1)
        conv = self.conv.to(statistics_dtype(self.conv))  # here, where a compiled graph casts it and its gradient
        (k,), taps_NPE = self.eager(conv_of, info, [k], [conv], taps_NPE)
        return torch.cat([q, k, v], -1), taps_NPE

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: AttentionState | None, info: SequenceInfo
    ) -> tuple[Tensor, AttentionState | None]:
        """The output of all heads, [B, T, H·D], and the new state."""
        if self.is_tile(state, info):
            y_BHTD, state = attend_tile(q, k, v, state, info)  # pyright: ignore[reportArgumentType]
        elif isinstance(state, KeyValueSlots):
            y_BHTD = attend_one(q, *state, state.add(info.position, (k, v)))
        else:
            y_BHTD, state = self.eager(_Attention(self.window, info), q, k, v, state)
        return y_BHTD.transpose(1, 2).flatten(-2), state

    def heads_of(self, projected_BTE: Tensor, info: SequenceInfo) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [B, H, T, D]; H may be fewer heads for keys and values."""
        heads_BHTD = projected_BTE.unflatten(-1, (self.heads + 2 * self.kv_heads, -1)).transpose(1, 2)
        read_BHTD, v = heads_BHTD.split([self.heads + self.kv_heads, self.kv_heads], 1)
        if self.q_norm is not None and self.k_norm is not None:
            read = zip((self.q_norm, self.k_norm), read_BHTD.split([self.heads, self.kv_heads], 1), strict=True)
            read_BHTD = torch.cat([norm(x) if self.norms_heads else _norm_all(norm, x) for norm, x in read], 1)
        if info.rotary is not None:
            read_BHTD = apply_rotary(read_BHTD, info.rotary)  # of both: half of the operations
        q, k = read_BHTD.split([self.heads, self.kv_heads], 1)
        return q, k, v


MIXER = SoftmaxMixer


def _qk_norm(shape: SoftmaxShape, channels: int) -> nn.Module | None:
    """The norm of queries or keys, `channels` of all heads."""
    if not shape.own.qk_norm:
        return None
    channels = channels if shape.own.qk_norm == "all-heads" else SoftmaxSizes.of(shape).head
    return (ZeroCenteredRmsNorm if shape.zero_centered else nn.RMSNorm)(channels, eps=shape.norm_epsilon)


def _norm_all(norm: nn.Module, x_BHTD: Tensor) -> Tensor:
    return norm(x_BHTD.transpose(1, 2).flatten(-2)).unflatten(-1, (x_BHTD.shape[1], -1)).transpose(1, 2)


@dataclass(frozen=True)
class _Attention:
    """Attention of the tokens of one call."""

    window: int
    info: SequenceInfo

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, state: KeyValueState | None
    ) -> tuple[Tensor, KeyValueState | None]:
        if self.info.shard is not None and not (self.window or state or self.info.output_state):
            attend_block = lambda q, kv, info: _Attention(0, info)(q, *halves(kv), None)[0]
            return attend_balanced(attend_block, q, torch.cat([k, v], -1), self.info)[0], None
        up_to_here, sequence = self._around(k, v)
        attend_all = self._attend_rows if self.info.cu_seqlens is None else self._attend_packed
        return attend_all(q, up_to_here, sequence, state)

    def _around(self, k: Tensor, v: Tensor) -> tuple[KeysAndValues, KeysAndValues]:
        """Keys and values up to this rank's last token, and up to the sequence's last.

        Each rank keeps its queries and gathers, in one exchange, what others attend to: all tokens, or with a window
        the last window − 1 of each rank. What is left out is in no window.
        """
        info = self.info
        if info.shard is None:
            return (k, v), (k, v)
        split, kv_BHTD = info.shard.split, torch.cat([k, v], -1)
        # The state of each packed document needs keys from the middle of shards.
        if not self.window or (info.cu_seqlens is not None and info.output_state is True):
            sequence = info.shard.gather(kv_BHTD)
            up_to_here = sequence[:, :, : split.end]
        else:
            kept = [min(length, max(1, self.window - 1)) for length in split.lengths]
            sequence = info.shard.gather(last(kv_BHTD, kept[split.rank]), kept)
            up_to_here = torch.cat([sequence[:, :, : sum(kept[: split.rank])], kv_BHTD], 2)
        return halves(up_to_here), halves(sequence)

    def _attend_rows(
        self, q: Tensor, up_to_here: KeysAndValues, sequence: KeysAndValues, state: KeyValueState | None
    ) -> tuple[Tensor, KeyValueState | None]:
        info = self.info
        if state is not None:
            tokens, alone = max(info.start_positions), info.shard is None
            up_to_here = append(state, tokens, up_to_here)
            sequence = up_to_here if alone else append(state, tokens, sequence)
        if self.window:  # without what is before the first query's window
            up_to_here = last_of_both(up_to_here, q.shape[2] + self.window - 1)
        before_B = info.position[:, 0] if info.position.dim() == 2 else None  # None: as many as there are keys
        if before_B is None and q.shape[2] > 1:
            y = attend(q, up_to_here, self.window)
        else:
            y = causal_attention(q, *up_to_here, self.window, before_B)
        return y, KeyValueState(*map(self._in_window, sequence)) if info.output_state else None

    def _attend_packed(
        self, q: Tensor, up_to_here: KeysAndValues, sequence: KeysAndValues, state: KeyValueState | None
    ) -> tuple[Tensor, KeyValueState | None]:
        info, local, N = self.info, self.info.local, len(self.info.local.whole_lengths)

        def with_state(n: int, of_document: KeysAndValues) -> KeysAndValues:
            if state is None or n >= len(state.key):
                return of_document
            row = KeyValueState(state.key[n : n + 1], state.value[n : n + 1])
            return append(row, info.start_positions[n], of_document)

        # Of earlier ranks' tokens, only the first document here has some.
        before = min(up_to_here[0].shape[2] - q.shape[2], local.before[0])
        kv = last_of_both(up_to_here, before + q.shape[2])
        keys = before + local.lengths[0], *local.lengths[1:]
        if state is not None and local.documents.start < len(state.key):
            split = zip(*(x.split(keys, 2) for x in kv), strict=True)
            documents = [with_state(n, document) for n, document in enumerate(split, local.documents.start)]
            kv = torch.cat([k for k, _ in documents], 2), torch.cat([v for _, v in documents], 2)
            keys = tuple(k.shape[2] for k, _ in documents)
        if self.window and (beyond := keys[0] - (local.lengths[0] + self.window - 1)) > 0:
            kv, keys = last_of_both(kv, sum(keys) - beyond), (keys[0] - beyond, *keys[1:])
        y = attend(q, kv, self.window, (local.lengths, keys))
        if not info.output_state:
            return y, None
        if info.output_state == "last":
            ends = [with_state(N - 1, last_of_both(sequence, local.whole_lengths[-1]))]
        else:
            whole = zip(*(x.split(local.whole_lengths, 2) for x in sequence), strict=True)
            ends = [with_state(n, of_document) for n, of_document in enumerate(whole)]
        states = (_right_aligned([self._in_window(end[i]) for end in ends]) for i in (0, 1))
        return y, KeyValueState(*states)

    def _in_window(self, x_BHSD: Tensor) -> Tensor:
        """The keys or values that later tokens attend to, copied so that the memory of the others can be freed."""
        dropped = x_BHSD.shape[2] - (self.window - 1)
        if self.window and dropped > 0:
            return x_BHSD[:, :, dropped:].clone()
        return x_BHSD if x_BHSD.requires_grad else x_BHSD.contiguous()


def _right_aligned(rows: list[Tensor]) -> Tensor:
    S = max(row.shape[2] for row in rows)
    return torch.cat([pad(row, (0, 0, S - row.shape[2], 0)) for row in rows])
