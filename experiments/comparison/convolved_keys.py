"""Softmax attention whose keys, or keys and values, pass through a convolution of four tokens: a plugin.

    tost train demo 'model.plugins=["experiments/comparison/convolved_keys.py"]' model.pattern=DDDC \\
      model.norm_after=C run.name=convolved

The convolution begins as a shift by one token, so a token that meets an equal one attends to what followed that: what
two layers of attention learn as an induction head, one has from the start. It comes before norm and rotary embedding.

Shapes: B sequences, T tokens, C channels, E convolved channels, N documents.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from tost_lm.mixers.delta.layer import conv_std
from tost_lm.mixers.delta.settings import CONV_TAPS
from tost_lm.mixers.plugins import register
from tost_lm.mixers.shape import MixerShape
from tost_lm.mixers.softmax.layer import ATTENTION, SoftmaxMixer
from tost_lm.mixers.softmax.settings import SoftmaxSettings, SoftmaxSizes
from tost_lm.mixers.softmax.spec import SoftmaxSpec
from tost_lm.mixers.spec import Numbers
from tost_lm.ops.initialization import InitialValue, Normal, set_own_constants
from tost_lm.ops.positions import SequenceInfo
from tost_lm.ops.short_conv import CONVOLUTION


class ConvolvedKeysSettings(SoftmaxSettings):
    """`model.plugin_settings.C`: settings of softmax attention, and two."""

    values: bool = False
    """Values pass through the convolution too."""
    shift: bool = True
    """It begins as a shift by one token; else at random."""


class ConvolvedKeysSpec(SoftmaxSpec):
    letter, name, tag, settings = "C", "softmax attention, convolved keys", "convolved-keys", ConvolvedKeysSettings

    def numbers(self, shape: MixerShape) -> Numbers:
        numbers, convolved = super().numbers(shape), SoftmaxSizes.of(shape).keys * (1 + shape.own.values)
        return numbers._replace(split=(*numbers.split, (convolved, CONV_TAPS)))


class ConvolvedKeysState(NamedTuple):
    """The state after some tokens."""

    key: Tensor
    value: Tensor
    taps: Tensor
    """The last tokens before the convolution, [N, CONV_TAPS − 1, E]; zeros before the first one."""


class ConvolvedKeys(SoftmaxMixer):
    State, TileState, FIXED_STATE = ConvolvedKeysState, None, False
    OF_HEADS = ("conv",)

    def __init__(self, shape: MixerShape):
        super().__init__(shape)
        sizes, self.shift = SoftmaxSizes.of(shape), shape.own.shift
        channels = sizes.keys * (1 + shape.own.values)
        self.parts = [sizes.queries, channels, sizes.projected - sizes.gate - sizes.queries - channels, sizes.gate]
        """Channels of the projection: queries, those that are convolved, values that are not, and the gate."""
        self.conv = nn.Parameter(torch.empty(channels, CONV_TAPS))
        set_own_constants(self)

    def initial_values(self) -> dict[str, InitialValue]:
        if not self.shift:
            return {"conv": Normal(conv_std())}
        taps_EK = torch.zeros_like(self.conv, device="cpu")
        taps_EK[:, -2] = 1  # the token before
        return {"conv": taps_EK}

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x_BTC: Tensor, state: ConvolvedKeysState | None, info: SequenceInfo
    ) -> tuple[Tensor, ConvolvedKeysState | None]:
        queries, convolved, values, gate = self.in_proj(x_BTC).split(self.parts, -1)
        key_state, taps = (state[:2], state.taps) if state else ((None, None), None)
        tensors = [convolved, self.conv, taps, info.state_offsets]
        convolved, *taps = CONVOLUTION(info, info.handle, tensors, info.wanted_state)
        q, k, v = self.heads_of(torch.cat([queries, convolved, values], -1), info)
        tensors = [q, k, v, *key_state, info.state_offsets]
        y_BTC, *key_state = ATTENTION(info, info.handle, tensors, str(self.window), info.wanted_state)
        y_BTC = y_BTC * gate.sigmoid() if self.gated else y_BTC
        return self.out_proj(y_BTC), ConvolvedKeysState(*key_state, *taps) if taps else None


register(ConvolvedKeysSpec(), ConvolvedKeys)
