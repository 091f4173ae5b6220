"""Settings of delta layers, and sizes that their operator and the resource plan share. No torch is imported."""

from typing import NamedTuple

from pydantic import Field

from tost_lm.config import Section
from tost_lm.mixers.shape import MixerShape

CONV_TAPS = 4
"""Tokens that the convolution of queries, keys and values reads."""

CHUNK_TOKENS = 32
"""Tokens of a chunk, a power of two: a system of as many equations is solved for each head."""

GROUP_ELEMENTS = 1 << 16
"""Elements of the [L, L] scores of chunks that a CPU computes at once: what is computed of them stays in its cache."""

DEVICE_GROUP_ELEMENTS = 1 << 20
"""The same on other devices: enough that most calls are those of single chunks, and so few that the backward needs less
memory for them than an MLP for its own. With 16 times as many it needed 13 GB (Qwen3.5-9B, 65,536 tokens a rank)."""

GROUP_CHUNKS = 8
"""Chunks of a document that are computed at once, at least: a state is stored for each group of them."""


def pieces_of_maps(tokens: int, rows: int, heads: int) -> int:
    """Pieces of a row of so many tokens whose maps a device computes at once, and then one map of all: the time of a
    map of many tokens is that of launches, of which all pieces together need as many as one."""
    at_once = DEVICE_GROUP_ELEMENTS // (heads * CHUNK_TOKENS**2)
    return max(1, min(at_once // rows, -(-tokens // CHUNK_TOKENS)) // GROUP_CHUNKS)


class DeltaSettings(Section):
    """Settings of D layers, `[model.delta]`."""

    qk_heads: int | None = Field(default=None, gt=0)
    """Heads of queries and keys; without it model.heads."""
    value_heads: int | None = Field(default=None, gt=0)
    """Heads of values, each with a state: a multiple of qk_heads; without it qk_heads."""
    qk_size: int | None = Field(default=None, gt=0)
    """Channels of a query and of a key; without it model.width / model.heads."""
    value_size: int | None = Field(default=None, gt=0)
    """Channels of the values of a head; without it qk_size."""
    beta_to_two: bool = False
    """Write strengths up to 2 instead of 1: the state can reverse what it returns for a key (arXiv 2411.12537)."""
    decay_per_channel: bool = False
    """A decay for each channel of a key instead of each head, and output gates by a sigmoid instead of SiLU, as in Kimi Delta Attention (arXiv 2510.26692)."""
    norm_epsilon: float = Field(default=1e-5, gt=0)
    """Added to the mean square in the norm of the outputs."""


DeltaShape = MixerShape[DeltaSettings]


class DeltaSizes(NamedTuple):
    """Heads and channels of a delta layer."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int

    @classmethod
    def of(cls, shape: DeltaShape) -> "DeltaSizes":
        own = shape.own
        key_heads, key_size = own.qk_heads or shape.heads, own.qk_size or shape.width // shape.heads
        return cls(key_heads, own.value_heads or key_heads, key_size, own.value_size or key_size)

    @property
    def convolved(self) -> int:
        """Channels of queries, keys and values."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size
