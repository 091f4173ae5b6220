"""The keys and values that a softmax layer keeps of earlier tokens, and their memory in decoding.

Shapes: N rows, G heads of keys and values, S earlier tokens, T new tokens, D channels a head.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tost_lm.mixers.layer import room_after
from tost_lm.mixers.state import SharedState
from tost_lm.ops.layout import to_device

KeysAndValues = tuple[Tensor, Tensor]
"""Each [N, G, S, D]."""


class KeyValueState(NamedTuple):
    """Keys (after norm and rotary embedding) and values of earlier tokens, each [N, G, S, D]: of all tokens, or with a
    window of the last window − 1. Rows with fewer tokens are padded on the left."""

    key: Tensor
    value: Tensor


class KeyValueSlots(NamedTuple):
    """Keys and values in decoding, each [N, G, slots, D]. Those of position p are in slot p modulo `slots`, so with a
    window a token takes the slot of the one that leaves it."""

    key: Tensor
    value: Tensor

    @classmethod
    def of(cls, state: KeyValueState, positions: Sequence[int], slots: int) -> "KeyValueSlots":
        """A copy of a state after `positions` tokens of each row. Slots without a token are zeros."""
        slot_S, end_N1 = torch.arange(slots), torch.tensor(positions)[:, None]
        last_NS = slot_S + (end_N1 - 1 - slot_S).div(slots, rounding_mode="floor") * slots  # the last position of each
        index_NS = (last_NS - end_N1 + state.key.shape[2] + 1).clamp(min=0)  # 0: none, where a column is added
        index_N1S1 = to_device(index_NS, state.key.device)[:, None, :, None]
        _, G, _, D = state.key.shape
        return cls(*(pad(x, (0, 0, 1, 0)).gather(2, index_N1S1.expand(-1, G, -1, D)) for x in state))

    def with_room(self, window: int | None) -> "KeyValueSlots":
        """A copy with more slots, where all have a token and the window is longer."""
        slots = self.key.shape[2]
        return KeyValueSlots(*(pad(x, (0, 0, 0, room_after(slots, window) - slots)) for x in self))

    def add(self, position_N1: Tensor, kv: KeysAndValues) -> Tensor:
        """Add a token of each row, in place. Returns which slots have a token, [N, slots]."""
        slots = self.key.shape[2]
        index_NGSD = (position_N1 % slots)[:, None, :, None].expand_as(kv[0])
        for x, new in zip(self, kv, strict=True):
            bits = torch.int16 if x.element_size() == 2 else x.dtype  # CPUs scatter bfloat16 in a copy of all slots
            x.view(bits).scatter_(2, index_NGSD, new.view(bits))
        return torch.arange(slots, device=position_N1.device) <= position_N1


class ConvolvedState(NamedTuple):
    """The state of a layer with `softmax.conv`."""

    attention: KeyValueState | KeyValueSlots | SharedState
    taps: Tensor
    """The last keys before the convolution, [N, CONV_TAPS − 1, G·D]; zeros before the first token."""

    def with_room(self, window: int | None) -> "ConvolvedState":
        """As that of `KeyValueSlots`."""
        assert isinstance(self.attention, KeyValueSlots)
        return self._replace(attention=self.attention.with_room(window))


def append(state: KeyValueState, tokens: int, kv: KeysAndValues) -> KeysAndValues:
    """Keys and values of `state`, of which no row has more than `tokens` tokens (the others are padding), and `kv`."""
    k, v = last_of_both(state, tokens)
    return torch.cat([k, kv[0]], 2), torch.cat([v, kv[1]], 2)


def halves(kv_NGSE: Tensor) -> KeysAndValues:
    """Keys and values that are side by side."""
    k, v = kv_NGSE.chunk(2, -1)
    return k, v


def last(x_NGSD: Tensor, tokens: int) -> Tensor:
    """The last `tokens` tokens, or all if there are fewer."""
    return x_NGSD[:, :, max(0, x_NGSD.shape[2] - tokens) :]


def last_of_both(kv: KeysAndValues, tokens: int) -> KeysAndValues:
    return last(kv[0], tokens), last(kv[1], tokens)
