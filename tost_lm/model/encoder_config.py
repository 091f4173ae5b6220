"""The shape of an encoder."""

from typing import Literal

from pydantic import Field, model_validator

from tost_lm.config import Section
from tost_lm.model.config import ModelConfig, check_blocks


class EncoderConfig(Section):
    """A bidirectional encoder with a classification head: pre-norm blocks of a token mixer and an MLP."""

    classes: int = Field(gt=0)
    """Number of classes."""
    pattern: str = "T"
    """Token mixer of each layer, one letter a layer, repeated to fill all layers: T bidirectional token statistics self-attention, A softmax attention of all tokens of a document."""
    layers: int = Field(gt=0)
    """Number of blocks; a multiple of the pattern's length."""
    heads: int = Field(gt=0)
    """Number of heads of the mixer; must divide model.width."""
    width: int = Field(gt=0)
    """Channels of the residual stream (hidden size)."""
    vocab_size: int | None = Field(default=None, gt=0)
    """Rows of the token embedding. The model then reads ids."""
    patch_size: int | None = Field(default=None, gt=0)
    """Side of the square patches, in pixels, that are the tokens of an image. The model then reads images. Either this or model.vocab_size is needed."""
    image_channels: int = Field(default=3, gt=0)
    """Colours of an image."""
    positions: Literal["learned", "sinusoidal", "none"] = "learned"
    """Position embedding, added to the token embedding: `learned`, `sinusoidal` or `none`."""
    max_positions: int = Field(default=1024, gt=0)
    """Rows of the learned positions: the tokens of the longest document, without the class token."""
    pooling: Literal["mean", "class_token"] = "mean"
    """What the head reads of a document: the mean of its tokens, or a learned token before them."""
    towers: Literal[1, 2] = 1
    """Documents of an example. With 2, the same weights encode both, and the head reads their features x, y, x·y and x − y."""
    layer_scale: float = Field(default=1.0, ge=0)
    """Initial LayerScale of both branches of a block; 0: no LayerScale."""
    bias: bool = True
    """Biases in linear layers and norms of the blocks."""

    @property
    def blocks(self) -> ModelConfig:
        """The settings of the blocks and their norms."""
        return ModelConfig(
            pattern=self.pattern, layers=self.layers, heads=self.heads, width=self.width, positions="none",
            denom_bias="none", rope_theta=0.0, layer_scale=self.layer_scale, bias=self.bias,
        )  # fmt: skip

    @model_validator(mode="after")
    def _fits(self) -> "EncoderConfig":
        if not self.pattern or set(self.pattern) - {"T", "A"}:
            raise ValueError(
                f"invalid model.pattern: {self.pattern!r}; use the letters T (TSSA) and A (softmax attention)"
            )
        check_blocks(self.layers, self.heads, self.width, self.pattern)
        if (self.vocab_size is None) == (self.patch_size is None):
            raise ValueError("the model reads either ids or images; set model.vocab_size or model.patch_size")
        return self
