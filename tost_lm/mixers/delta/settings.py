"""Settings of delta layers, and sizes that their operator and the resource plan share. No torch is imported."""

from typing import Self

from pydantic import Field, model_validator

from tost_lm.config import Section

CONV_TAPS = 4
"""Tokens that the convolution of queries, keys and values reads."""

CHUNK_TOKENS = 32
"""Tokens of a chunk: a system of as many equations is solved for each head."""

GROUP_ELEMENTS = 1 << 16
"""Elements of the [L, L] scores of chunks that a CPU computes at once: what is computed of them stays in its cache."""

DEVICE_GROUP_ELEMENTS = 1 << 24
"""The same on other devices: enough to hide the overhead of calls."""

GROUP_CHUNKS = 8
"""Chunks of a document that are computed at once, at least: a state is stored for each group of them."""


class DeltaConfig(Section):
    """Shape of a delta layer."""

    key_heads: int = Field(default=4, gt=0)
    """Heads of queries and keys."""
    value_heads: int | None = Field(default=None, gt=0)
    """Heads of values, each with a state: a multiple of key_heads; without it key_heads."""
    key_size: int = Field(default=128, gt=0)
    """Channels of a query and of a key."""
    value_size: int = Field(default=128, gt=0)
    """Channels of the values of a head."""
    beta_to_two: bool = False
    """Write strengths up to 2 instead of 1: the state can reverse what it returns for a key (arXiv 2411.12537)."""
    norm_epsilon: float = Field(default=1e-6, gt=0)
    """Added to the mean square in the norm of the outputs."""

    @property
    def heads(self) -> int:
        """Value heads."""
        return self.value_heads or self.key_heads

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.heads % self.key_heads:
            raise ValueError(
                f"value_heads {self.value_heads} is not a multiple of key_heads {self.key_heads}; change one of them"
            )
        return self
