"""Settings of TSSA layers."""

from typing import Literal

from tost_lm.config import Section
from tost_lm.mixers.shape import MixerShape


class TssaSettings(Section):
    """Settings of T layers, `[model.tssa]`."""

    membership: Literal["energy-share", "energy-mean", "uniform"] = "energy-share"
    """Scores of a token, whose softmax over heads is its membership. `energy-share`, as published, divides the energy w² by its running sum. `energy-mean` divides by the running mean instead, so scores do not shrink with the length. `uniform` sets every membership to 1/heads; temp and denom_bias then have no effect."""
    denom_bias: Literal["position", "head", "none"] = "position"
    """Learned bias of the scores. `position` has a number for each head and position, as published; `head` one for each head; `none` no bias."""


TssaShape = MixerShape[TssaSettings]
