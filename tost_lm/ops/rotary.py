"""The settings of a rotary embedding. This module does not import torch."""

import math
from typing import NamedTuple

LLAMA3_LENGTH = 8192
"""The context in tokens that Llama 3.1 extends."""


class Rotary(NamedTuple):
    """The rotary embedding whose angles a mixer reads."""

    channels: int
    """Rotated channels of a head."""
    theta: float
    """The base."""
    scaling: str = "llama3"
    """How the factor changes frequencies: `llama3`, `yarn` or `linear`."""
    factor: float = 1.0
    """1: no scaling."""
    original_length: int = LLAMA3_LENGTH
    """Positions without the scaling."""

    @property
    def amplitude(self) -> float:
        """What cosine and sine are multiplied by."""
        return 0.1 * math.log(self.factor) + 1 if self.scaling == "yarn" else 1.0

    @property
    def yarn_pairs(self) -> tuple[float, float]:
        """The last channel pair that YaRN (arXiv 2309.00071) leaves as it is, which turns 32 times in the original
        length, and the first one that is slower by the whole factor, which turns once."""
        turns = [self.original_length / (2 * math.pi * count) for count in (32, 1)]
        first, last = (self.channels * math.log(one) / (2 * math.log(self.theta)) for one in turns)
        kept, slowed = max(math.floor(first), 0), min(math.ceil(last), self.channels - 1)
        return kept, slowed + 0.001 if slowed == kept else slowed
