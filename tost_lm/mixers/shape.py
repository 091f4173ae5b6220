"""The part of a model's settings that a mixer reads."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from tost_lm.config import Section

Settings = TypeVar("Settings", bound=Section)


@dataclass(frozen=True)
class MixerShape(Generic[Settings]):
    """The numbers of [model] that a mixer reads, and its own section. `ModelConfig.shape_of` makes it."""

    width: int
    """Channels of the residual stream."""
    heads: int
    bias: bool
    """Whether projections have biases."""
    norm_epsilon: float
    """Added to the variance in norms."""
    zero_centered: bool
    """Whether the factor of an RMSNorm is 1 + its weight."""
    max_positions: int
    """Rows of tables of positions."""
    own: Settings
    """The mixer's section, or a plugin's `settings`."""
