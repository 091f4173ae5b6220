"""The slot mixer: a memory of slots that tokens are written to and read from, with a state of constant size.

Shapes: B sequences, T tokens, C channels, H heads, S slots a head, V value channels a head, K taps of the convolution.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from tost_lm.mixers.layer import TokenMixer
from tost_lm.mixers.slots.memory import SlotSums, slot_memory, slot_memory_step
from tost_lm.mixers.slots.settings import CONV_TAPS, SlotsShape
from tost_lm.ops.initialization import InitialValue, set_own_constants
from tost_lm.ops.positions import SequenceInfo, state_rows
from tost_lm.ops.precision import running_dtype, statistics_dtype
from tost_lm.ops.registered import Registered
from tost_lm.ops.short_conv import CONVOLUTION

INITIAL_TEMP = 2.0
SHORTEST_HALF_LIFE, LONGEST_HALF_LIFE = 4.0, 512.0
LASTING_HALF_LIFE = 2.0**20
NORM_EPSILON = 1e-6


class SlotState(NamedTuple):
    """The state of a slot layer after some tokens; zeros before the first one."""

    memory: Tensor
    """M, [N, H, S, V]."""
    mass: Tensor
    """N, [N, H, S]."""
    taps: Tensor
    """The last K − 1 keys before the convolution, [N, K − 1, H·S]."""

    def to_running_dtype(self) -> "SlotState":
        """With sums for any number of further tokens."""
        dtype = running_dtype(self.mass.device)
        return SlotState(self.memory.to(dtype), self.mass.to(dtype), self.taps)


class SlotMixer(TokenMixer):
    """A token is written to the slots that the key of the tokens before it selects, and reads those that its query
    selects. The key's convolution begins as a shift by one token, so what is written is what followed."""

    State = SlotState
    OF_HEADS = ("conv", "write_temp", "read_temp", "log_rate", "norm")
    FIXED_STATE = True

    def __init__(self, shape: SlotsShape):
        super().__init__()
        H, S, V = shape.heads, shape.own.per_head, shape.own.value_size
        self.heads, self.slots, self.channels = H, S, V
        self.in_proj = nn.Linear(shape.width, H * (2 * S + 2 * V), bias=shape.bias)
        self.out_proj = nn.Linear(H * V, shape.width, bias=shape.bias)
        self.conv = nn.Parameter(torch.empty(H, S, CONV_TAPS))
        self.write_temp, self.read_temp, self.log_rate = (nn.Parameter(torch.empty(H)) for _ in range(3))
        self.norm = nn.Parameter(torch.empty(H, V))
        set_own_constants(self)

    def initial_values(self) -> dict[str, InitialValue]:
        conv = torch.zeros(self.conv.shape, device="cpu")
        conv[..., -2] = 1
        temps = dict.fromkeys(("write_temp", "read_temp"), INITIAL_TEMP)
        return {"conv": conv, **temps, "log_rate": initial_log_rates(self.heads), "norm": 1.0}

    def forward(self, x_BTC: Tensor, state: SlotState | None, info: SequenceInfo) -> tuple[Tensor, SlotState | None]:
        """Mix the tokens, given the state after earlier tokens. One token per document uses the recurrent form."""
        S, V = self.slots, self.channels
        heads_BTHE = self.in_proj(x_BTC).unflatten(-1, (self.heads, -1))
        key, query, value_BTHV, gate_BTHV = heads_BTHE.split([S, S, V, V], -1)
        tensors = [key.flatten(-2), self.conv.flatten(0, 1), state.taps if state else None, info.state_offsets]
        key_BTE, *taps = CONVOLUTION(info, info.handle, tensors, info.wanted_state)
        write_BTHS = memberships(key_BTE.unflatten(-1, (self.heads, S)), self.write_temp)
        read_BTHS = memberships(query, self.read_temp)
        sums = [state.memory, state.mass] if state else [None, None]
        tensors = [read_BTHS, write_BTHS, value_BTHV, self.log_decay(), *sums, info.state_offsets]
        y_BTHV, *new_sums = MEMORY(info, info.handle, tensors, info.wanted_state)
        y_BTHV = rms_norm(y_BTHV, (V,), eps=NORM_EPSILON) * self.norm * gate_BTHV.sigmoid()
        return self.out_proj(y_BTHV.flatten(-2)), SlotState(*new_sums, *taps) if taps else None

    def log_decay(self) -> Tensor:
        """log ρ of each head, [H], in the statistics dtype: −ln 2 / half-life in tokens."""
        return -self.log_rate.to(statistics_dtype(self.log_rate)).exp()


MIXER = SlotMixer


def memberships(scores_BTHS: Tensor, temp_H: Tensor) -> Tensor:
    """The softmax over the slots of each head, in the statistics dtype."""
    dtype = statistics_dtype(scores_BTHS)
    with torch.autocast(scores_BTHS.device.type, enabled=False):
        return (temp_H.to(dtype)[:, None] * scores_BTHS.to(dtype)).softmax(-1)


def _remember(info: SequenceInfo, tensors: Sequence[Any], _wanted: str) -> list[Tensor]:
    read_BTHS, write_BTHS, value_BTHV, log_decay_H, *sums, _ = tensors
    state = None if sums[0] is None else SlotSums(*map(info.pad_rows, sums))  # pyright: ignore[reportArgumentType]
    if state is not None and info.recurrent:
        read, write, value = (x.flatten(0, 1) for x in (read_BTHS, write_BTHS, value_BTHV))
        y_NHV, state = slot_memory_step(read, write, value, log_decay_H, state)
        y_BTHV = y_NHV.view_as(value_BTHV)
    else:
        y_BTHV, state = slot_memory(
            read_BTHS, write_BTHS, value_BTHV, log_decay_H, local=info.local, initial_state=state,
            output_final_state=bool(info.output_state), shard=info.shard,
        )  # fmt: skip
    return [y_BTHV, *(map(info.select_rows, state) if state and info.output_state else ())]


def _fake_remember(tensors: Sequence[Any], wanted_state: str) -> list[Tensor]:
    _, write_BTHS, value_BTHV, *_, offsets = tensors
    y_BTHV, (B, _, H, V) = value_BTHV.new_empty(value_BTHV.shape), value_BTHV.shape
    N, S, dtype = state_rows(B, offsets), write_BTHS.shape[-1], running_dtype(value_BTHV.device)
    sums = [value_BTHV.new_empty(shape, dtype=dtype) for shape in ((N, H, S, V), (N, H, S))]
    return [y_BTHV, *sums] if wanted_state else [y_BTHV]


MEMORY = Registered("slot_memory", _remember, _fake_remember)


def initial_log_rates(heads: int) -> Tensor:
    """log(ln 2 / half-life) of each head: a ladder from 4 to 512 tokens, then as many heads that hardly forget.

    It is the proportion of the layer with two heads that was compared with others (docs/experiments.md).
    """
    forgetting = heads // 2
    ratio = (LONGEST_HALF_LIFE / SHORTEST_HALF_LIFE) ** (1 / max(1, forgetting - 1))
    half_lives = [SHORTEST_HALF_LIFE * ratio**h for h in range(forgetting)]
    half_lives += [LASTING_HALF_LIFE] * (heads - forgetting)
    return torch.tensor([math.log(math.log(2) / half_life) for half_life in half_lives], device="cpu")
