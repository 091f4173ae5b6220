"""Variants of `model.softmax.conv`: values pass through the convolution too, or it begins at random. A plugin.

    tost train demo 'model.plugins=["experiments/comparison/convolved_keys.py"]' model.pattern=DDDC \\
      model.norm_after=C model.plugin_settings.C.values=true run.name=convolved
"""

import torch
from torch import nn

from tost_lm.mixers.delta.layer import conv_std
from tost_lm.mixers.plugins import register
from tost_lm.mixers.shape import MixerShape
from tost_lm.mixers.softmax.layer import SoftmaxMixer
from tost_lm.mixers.softmax.settings import CONV_TAPS, SoftmaxSettings, SoftmaxSizes
from tost_lm.mixers.softmax.spec import SoftmaxSpec
from tost_lm.mixers.spec import Numbers
from tost_lm.ops.initialization import InitialValue, Normal, set_own_constants


class ConvolvedKeysSettings(SoftmaxSettings):
    """`model.plugin_settings.C`: settings of softmax attention, and two."""

    conv: bool = True
    values: bool = False
    """Values pass through the convolution too."""
    shift: bool = True
    """It begins as a shift by one token; else at random."""


class ConvolvedKeysSpec(SoftmaxSpec):
    letter, name, tag, settings = "C", "softmax attention, convolved keys", "convolved-keys", ConvolvedKeysSettings

    def numbers(self, shape: MixerShape) -> Numbers:
        convolved = SoftmaxSizes.of(shape).keys * (1 + shape.own.values)
        return super().numbers(shape)._replace(split=((convolved, CONV_TAPS),))


class ConvolvedKeys(SoftmaxMixer):
    shift = True

    def __init__(self, shape: MixerShape):
        super().__init__(shape)
        self.shift = shape.own.shift
        channels = SoftmaxSizes.of(shape).keys * (1 + shape.own.values)
        self.conv = nn.Parameter(conv_std() * torch.randn(channels, CONV_TAPS))
        set_own_constants(self)

    def initial_values(self) -> dict[str, InitialValue]:
        return super().initial_values() if self.shift else {"conv": Normal(conv_std())}


register(ConvolvedKeysSpec(), ConvolvedKeys)
