"""Settings of context extension."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from tost_lm.config import Section


class ExtensionConfig(Section):
    """How the learned tables of positions change."""

    folder: Path
    """Model folder to write: weights and tokenizer, as in an export."""
    max_positions: int = Field(gt=0)
    """The new model.max_positions."""
    positions: Literal["keep", "interpolate", "sinusoidal", "none"] | None = None
    """Learned position embedding; required if the model has one. `keep` keeps its rows and sets new positions to their mean; `interpolate` interpolates the rows linearly over the new length; `sinusoidal` and `none` replace the table."""
    denom_bias: Literal["keep", "interpolate", "head", "none"] | None = None
    """T layers: denom_bias for each position; required if the model has one. `keep` keeps it and sets new positions to the mean of each head; `interpolate` interpolates it linearly over the new length; `head` uses the mean of each head at all positions; `none` removes it."""
    rope_theta: float | None = Field(default=None, gt=0)
    """A layers: new base of the rotary embedding; unset: unchanged. With a larger base, new positions have angles closer to those of training (arXiv 2309.16039 uses 500000 for 32k tokens)."""


class ExtendConfig(Section):
    """The settings of `tost extend`."""

    extend: ExtensionConfig = Field(default_factory=dict, validate_default=True)
