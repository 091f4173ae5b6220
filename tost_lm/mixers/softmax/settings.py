"""Settings of softmax attention layers."""

from pydantic import Field

from tost_lm.config import Section


class SoftmaxSettings(Section):
    """A layers."""

    kv_heads: int | None = Field(default=None, gt=0)
    """A layers: heads of keys and values (grouped-query attention), a divisor of model.heads; without it model.heads. Keys and values in memory and between sequence ranks shrink by the same factor."""
    qk_norm: bool = False
    """A layers: RMSNorm of the queries and keys of each head before the rotary embedding, which bounds the scores. All heads of a layer share its two scales."""
    rope_theta: float = Field(default=10000.0, ge=0)
    """A layers: base of the rotary embedding of queries and keys; 0: no rotary embedding."""
    window: int = Field(default=0, ge=0)
    """A layers: sliding window in tokens. A token attends to itself and the window − 1 tokens before it; 0: to all tokens before it."""
