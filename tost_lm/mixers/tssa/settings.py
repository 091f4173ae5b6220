"""Settings of TSSA layers."""

from typing import Literal

from tost_lm.config import Section
from tost_lm.mixers.shape import MixerShape


class TssaSettings(Section):
    """Settings of T layers, `[model.tssa]`."""

    denom_bias: Literal["position", "head", "none"] = "position"
    """Learned bias of the scores. `position` has a number for each head and position, as published; `head` one for each head; `none` no bias."""


TssaShape = MixerShape[TssaSettings]
