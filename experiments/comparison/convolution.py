"""A gated convolution of 4 tokens, without any memory of those before: a plugin, the control of the comparisons.

    tost train demo 'model.plugins=["experiments/comparison/convolution.py"]' model.pattern=G run.name=convolution

It is a delta layer without its state: values pass through the convolution, SiLU, the norm of each head and the gate.
What it does as well as a mixer is no evidence for the memory of that mixer.

Shapes: B sequences, T tokens, C channels, H heads of V channels, E = H·V, K taps, N documents.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from tost_lm.config import Section
from tost_lm.mixers.delta.layer import conv_std
from tost_lm.mixers.delta.settings import CONV_TAPS
from tost_lm.mixers.layer import TokenMixer
from tost_lm.mixers.plugins import register
from tost_lm.mixers.shape import MixerShape
from tost_lm.mixers.spec import RecurrentSpec
from tost_lm.ops.initialization import InitialValue, Normal, set_own_constants
from tost_lm.ops.positions import SequenceInfo
from tost_lm.ops.short_conv import conv_of

NORM_EPSILON = 1e-5


class ConvolutionSettings(Section):
    """`model.plugin_settings.G` has no settings."""


class ConvolutionSpec(RecurrentSpec):
    letter, name, tag, settings = "G", "gated convolution", "gated-convolution", ConvolutionSettings

    def description(self, shape: MixerShape) -> str:
        return "gated convolution of four tokens"


class ConvolutionState(NamedTuple):
    """The state after some tokens; zeros before the first one."""

    taps: Tensor
    """The last K − 1 values before the convolution, [N, K − 1, E]."""


class GatedConvolution(TokenMixer):
    """silu(gate) · norm(silu(convolution of the values)), a norm for each head with one scale."""

    State, OF_HEADS, FIXED_STATE = ConvolutionState, ("conv",), True

    def __init__(self, shape: MixerShape):
        super().__init__()
        self.heads, self.size = shape.heads, shape.width // shape.heads
        self.in_proj = nn.Linear(shape.width, 2 * shape.width, bias=shape.bias)
        self.out_proj = nn.Linear(shape.width, shape.width, bias=shape.bias)
        taps = torch.empty(shape.width, CONV_TAPS)
        self.conv = nn.Parameter(taps.uniform_(-(CONV_TAPS**-0.5), CONV_TAPS**-0.5))
        self.norm = nn.Parameter(torch.empty(self.size))
        set_own_constants(self)

    def initial_values(self) -> dict[str, InitialValue]:
        return {"conv": Normal(conv_std()), "norm": 1.0}

    def forward(
        self, x_BTC: Tensor, state: ConvolutionState | None, info: SequenceInfo
    ) -> tuple[Tensor, ConvolutionState | None]:
        value, gate = self.in_proj(x_BTC).unflatten(-1, (self.heads, -1)).chunk(2, -1)
        before = state.taps if state else None
        (value_BTE,), taps = self.eager(conv_of, info, [value.flatten(-2)], [self.conv], before, True)
        y_BTHV = rms_norm(value_BTE.unflatten(-1, (self.heads, -1)), (self.size,), eps=NORM_EPSILON) * self.norm
        return self.out_proj((y_BTHV * silu(gate)).flatten(-2)), ConvolutionState(taps) if taps is not None else None


register(ConvolutionSpec(), GatedConvolution)
