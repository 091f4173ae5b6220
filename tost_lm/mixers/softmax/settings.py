"""Settings of softmax attention layers."""

from typing import Literal, NamedTuple

from pydantic import Field

from tost_lm.config import Section
from tost_lm.mixers.shape import MixerShape

CONV_TAPS = 4
"""Tokens that the convolution of the keys reads."""


class SoftmaxSettings(Section):
    """Settings of A layers, `[model.softmax]`."""

    head_size: int | None = Field(default=None, gt=0)
    """Channels of a head; without it model.width / model.heads."""
    kv_heads: int | None = Field(default=None, gt=0)
    """Heads of keys and values (grouped-query attention), a divisor of model.heads; without it model.heads. Keys and values in memory and between sequence ranks shrink by the same factor."""
    qk_norm: bool | Literal["all-heads"] = False
    """RMSNorm of the queries and keys before the rotary embedding, which bounds the scores. true: of each head; all heads of a layer share its two scales. `all-heads`: over the channels of all heads, as in OLMo models; tensor ranks cannot split it."""
    conv: bool = False
    """Keys pass through a causal convolution of 4 tokens, which begins as a shift by one token, before norm and rotary embedding: a token that meets an equal one attends to what followed that."""
    gate: bool = False
    """A gate for each channel of the output, the sigmoid of a projection of the layer's input (arXiv 2505.06708)."""
    rope_theta: float = Field(default=10000.0, ge=0)
    """Base of the rotary embedding of queries and keys; 0: no rotary embedding."""
    rotary_fraction: float = Field(default=1.0, gt=0, le=1)
    """Fraction of a head's channels that the rotary embedding rotates, the first ones."""
    rope_scaling: Literal["llama3", "yarn", "linear"] = "llama3"
    """Which rotations of the rotary embedding softmax.rope_scaling_factor slows down, to extend the context. `linear`: all. `llama3`: those of at most 1 turn in softmax.rope_original_length; those of at least 4 turns are unchanged, and those between interpolated. `yarn` (arXiv 2309.00071): in the same way between about 1 and 32 turns; it also multiplies rotated queries and keys by 1 + 0.1·ln(factor)."""
    rope_scaling_factor: float = Field(default=1.0, ge=1)
    """How many times slower they are, usually the new context divided by the original; 1: no scaling."""
    rope_original_length: int | None = Field(default=None, gt=0)
    """The original context in tokens, which `llama3` and `yarn` extend; `llama3` without it 8,192, as Llama 3."""
    window: int = Field(default=0, ge=0)
    """Sliding window in tokens. A token attends to itself and the window − 1 tokens before it; 0: to all tokens before it."""


def head_groups(heads: int, kv_heads: int, ranks: int) -> int:
    """Groups of heads that this many sequence ranks compute with, each with as many."""
    fits = (groups for groups in range(ranks, 0, -1) if not (ranks % groups or heads % groups))
    return next(groups for groups in fits if not (kv_heads % groups and groups % kv_heads))


SoftmaxShape = MixerShape[SoftmaxSettings]


class SoftmaxSizes(NamedTuple):
    """Channels of a softmax layer."""

    head: int
    queries: int
    """Those of all heads."""
    keys: int
    """Those of all heads; the values have as many."""
    gate: int

    @classmethod
    def of(cls, shape: SoftmaxShape) -> "SoftmaxSizes":
        own, head = shape.own, shape.own.head_size or shape.width // shape.heads
        queries = head * shape.heads
        return cls(head, queries, head * (own.kv_heads or shape.heads), queries if own.gate else 0)

    @property
    def projected(self) -> int:
        return self.queries + 2 * self.keys + self.gate
