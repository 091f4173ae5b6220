"""Settings of softmax attention layers."""

from typing import Literal

from pydantic import Field

from tost_lm.config import Section
from tost_lm.mixers.shape import MixerShape


class SoftmaxSettings(Section):
    """Settings of A layers, `[model.softmax]`."""

    kv_heads: int | None = Field(default=None, gt=0)
    """Heads of keys and values (grouped-query attention), a divisor of model.heads; without it model.heads. Keys and values in memory and between sequence ranks shrink by the same factor."""
    qk_norm: bool | Literal["all-heads"] = False
    """RMSNorm of the queries and keys before the rotary embedding, which bounds the scores. true: of each head; all heads of a layer share its two scales. `all-heads`: over the channels of all heads, as in OLMo models; tensor ranks cannot split it."""
    rope_theta: float = Field(default=10000.0, ge=0)
    """Base of the rotary embedding of queries and keys; 0: no rotary embedding."""
    window: int = Field(default=0, ge=0)
    """Sliding window in tokens. A token attends to itself and the window − 1 tokens before it; 0: to all tokens before it."""


SoftmaxShape = MixerShape[SoftmaxSettings]


def kv_width(shape: SoftmaxShape) -> int:
    """Channels of the keys of all heads, and of the values."""
    return shape.width // shape.heads * (shape.own.kv_heads or shape.heads)
