"""Settings of slot memory layers."""

from pydantic import Field

from tost_lm.config import Section
from tost_lm.mixers.shape import MixerShape

CONV_TAPS = 4
"""Tokens that the convolution of the keys reads."""


class SlotsSettings(Section):
    """Settings of S layers, `[model.slots]`."""

    per_head: int = Field(default=16, gt=0)
    """Slots of each head."""
    value_size: int = Field(default=28, gt=0)
    """Channels of the values of each head. With 64 channels of model.width a head, 16 slots of 28 channels and the convolution are a state of 8 · model.width numbers."""


SlotsShape = MixerShape[SlotsSettings]
