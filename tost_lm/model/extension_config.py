"""How a trained model comes to read longer sequences."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from tost_lm.config import Section


class ExtensionConfig(Section):
    """What becomes of all that is sized by a number of positions."""

    folder: Path
    """The model folder to write; weights and tokenizer, as an export."""
    max_positions: int = Field(gt=0)
    """What model.max_positions becomes."""
    positions: Literal["keep", "interpolate", "sinusoidal", "none"] | None = None
    """What becomes of a learned table of positions; must be set where there is one: `keep` its rows, and give further positions their mean; `interpolate`: stretch it over the new length; `sinusoidal` or `none` in its place."""
    denom_bias: Literal["keep", "interpolate", "head", "none"] | None = None
    """T layers, what becomes of a denom_bias for each position; must be set where there is one: `keep` it, and give further positions the mean of each head; `interpolate`: stretch it over the new length; `head`: that mean everywhere; `none` in its place."""
    rope_theta: float | None = Field(default=None, gt=0)
    """A layers, another base of the rotary embedding; a larger one turns far positions by angles that are nearer to those trained (arXiv 2309.16039 takes 500000 for 32k tokens); without it the base stays."""


class ExtendConfig(Section):
    """What `pretrain.extend` reads."""

    extend: ExtensionConfig = Field(default_factory=dict, validate_default=True)
