"""Settings of slot memory layers."""

from pydantic import Field

from tost_lm.config import Section

CONV_TAPS = 4
"""Tokens that the convolution of the keys reads."""


class SlotsSettings(Section):
    """S layers."""

    slots: int = Field(default=16, gt=0)
    """S layers: slots of each head."""
    slot_channels: int = Field(default=28, gt=0)
    """S layers: channels of the values of each head. With 64 channels of model.width a head, 16 slots of 28 channels and the convolution are a state of 8 · model.width numbers."""
