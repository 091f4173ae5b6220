"""The keys and values that a softmax layer keeps of earlier tokens, and their memory in decoding.

Shapes: N rows, G heads of keys and values, S earlier tokens, T new tokens, D channels a head.
"""

from typing import NamedTuple

import torch
from torch import Tensor

KeysAndValues = tuple[Tensor, Tensor]
"""Each [N, G, S, D]."""

ROOM_TOKENS = 256
"""Tokens between two copies of the cache. It is also the most memory that is never used."""


class KeyValueState(NamedTuple):
    """Keys (after norm and rotary embedding) and values of earlier tokens, each [N, G, S, D]: of all tokens, or with a
    window of the last window − 1. Rows with fewer tokens are padded on the left."""

    key: Tensor
    value: Tensor

    def to_running_dtype(self) -> "KeyValueState":
        """Nothing is summed."""
        return self

    def without_padding(self, tokens: int) -> KeysAndValues:
        """Without what is padding in all rows if no row has more than `tokens` tokens."""
        return last(self.key, tokens), last(self.value, tokens)


class _Memory:
    """Keys and values, [N, G, capacity, D], whose first `filled` tokens are in use.

    The keys of a state have it as an attribute, so states of one memory stay KeyValueState. Adding tokens changes no
    state: of several that share memory, the longest gets its tokens in place, and the others are copied. So is a state
    that another function built, which has no memory.
    """

    def __init__(self, kv: KeysAndValues):
        self.filled = kv[0].shape[2]
        self.kv = tuple(torch.cat([x, x.new_empty(*x.shape[:2], ROOM_TOKENS, x.shape[3])], 2) for x in kv)

    def has_room(self, begin: int, kv: KeysAndValues) -> bool:
        if begin != self.filled or begin + kv[0].shape[2] > self.kv[0].shape[2]:
            return False
        writable = torch.is_inference_mode_enabled() or not self.kv[0].is_inference()
        return writable and self.kv[0].dtype == kv[0].dtype

    def append(self, kv: KeysAndValues) -> None:
        begin, self.filled = self.filled, self.filled + kv[0].shape[2]
        for x, new in zip(self.kv, kv, strict=True):
            x[:, :, begin : self.filled] = new

    def state(self) -> KeyValueState:
        key, value = (x[:, :, : self.filled] for x in self.kv)
        key.memory = self  # pyright: ignore[reportAttributeAccessIssue]
        return KeyValueState(key, value)


def memory_of(state: KeyValueState | None) -> _Memory | None:
    """The memory that a state has room in; None: it has none."""
    return None if state is None else getattr(state.key, "memory", None)


def append(state: KeyValueState, tokens: int, kv: KeysAndValues) -> KeysAndValues:
    """Keys and values of `state`, of which no row has more than `tokens` tokens, and then `kv`."""
    k, v = state.without_padding(tokens)
    return torch.cat([k, kv[0]], 2), torch.cat([v, kv[1]], 2)


def append_in_memory(state: KeyValueState | None, tokens: int, kv: KeysAndValues) -> KeyValueState:
    """`append`, in the memory of `state` if it has room. There are no gradients."""
    memory = memory_of(state)
    if state is not None and memory is not None and memory.has_room(state.key.shape[2], kv):
        memory.append(kv)
    else:
        memory = _Memory(kv if state is None else append(state, tokens, kv))
    return memory.state()


def last(x_NGSD: Tensor, tokens: int) -> Tensor:
    """The last `tokens` tokens, or all if there are fewer."""
    return x_NGSD[:, :, max(0, x_NGSD.shape[2] - tokens) :]
