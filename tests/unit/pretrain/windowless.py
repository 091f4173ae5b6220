"""A user's mixer whose state grows with the text: one head of causal attention to all earlier tokens, without rotary
embedding, of rows that are whole documents."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from tost_lm.mixers.layer import TokenMixer
from tost_lm.mixers.plugins import register
from tost_lm.mixers.shape import MixerShape
from tost_lm.mixers.softmax.settings import SoftmaxSettings
from tost_lm.mixers.softmax.spec import SoftmaxSpec
from tost_lm.mixers.state import SharedState, TileTensor
from tost_lm.ops.positions import SequenceInfo


class WindowlessSpec(SoftmaxSpec):
    letter, name, tag, settings = "W", "windowless attention", "windowless", SoftmaxSettings


class KeysAndValues(NamedTuple):
    kv: Tensor


class Windowless(TokenMixer):
    State, TileState = KeysAndValues, SharedState

    def __init__(self, shape: MixerShape):
        super().__init__()
        self.in_proj = nn.Linear(shape.width, 3 * shape.width)
        self.out_proj = nn.Linear(shape.width, shape.width)

    def forward(
        self, x_BTC: Tensor, state: KeysAndValues | SharedState | None, info: SequenceInfo
    ) -> tuple[Tensor, KeysAndValues | SharedState | None]:
        q, kv = self.in_proj(x_BTC).split([x_BTC.shape[2], 2 * x_BTC.shape[2]], -1)
        shared = state.tiles if isinstance(state, SharedState) else ()
        past = list(state) if isinstance(state, KeysAndValues) else [tile.read(x_BTC.device) for tile in shared]
        all_kv = torch.cat([*past, kv], 1)
        k, v = all_kv.chunk(2, -1)
        T, S = x_BTC.shape[1], all_kv.shape[1]
        hidden_TS = torch.ones(T, S, dtype=torch.bool).triu(1 + S - T)
        pi_BTS = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden_TS, -torch.inf).softmax(-1)
        new_state = None
        if info.output_state == "last":
            new_state = SharedState((*shared, TileTensor(kv)))
        elif info.output_state:
            new_state = KeysAndValues(all_kv)
        return self.out_proj(pi_BTS @ v), new_state


register(WindowlessSpec(), Windowless)
