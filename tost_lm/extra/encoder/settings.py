"""The shape of an encoder. No torch is imported."""

from typing import Literal

from pydantic import Field, model_validator

from tost_lm.config import Section
from tost_lm.model.config import MAX_LAYERS, ModelConfig, check_blocks

ENCODER_MIXERS = "TSACN"
"""The letters of an encoder's pattern."""


class BlockConfig(ModelConfig):
    """The settings of an encoder's blocks, whatever their mixers."""

    hidden: int
    """Hidden channels of an MLP."""

    @property
    def mlp_width(self) -> int:
        return self.hidden


class EncoderConfig(Section):
    """A bidirectional encoder with a classification head: pre-norm blocks of a token mixer and an MLP."""

    classes: int = Field(gt=0)
    """Number of classes."""
    pattern: str = "T"
    """Token mixer of each layer, one letter a layer, repeated to fill all layers: T bidirectional token statistics self-attention, S slot memory in both directions, A softmax attention of all tokens of a document, C a short convolution in both directions, N none: each token alone."""
    layers: int = Field(gt=0, le=MAX_LAYERS)
    """Number of blocks; a multiple of the pattern's length."""
    heads: int = Field(gt=0)
    """Number of heads of the mixer; must divide model.width."""
    width: int = Field(gt=0)
    """Channels of the residual stream (hidden size)."""
    mlp_width: int | None = Field(default=None, gt=0)
    """Hidden channels of the MLP; unset: 4 times model.width."""
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
    """The features that the head reads: the mean of its tokens, or a learned token before them."""
    towers: Literal[1, 2] = 1
    """Documents of an example. With 2, the same weights encode both, and the head reads their features x, y, x·y and x − y."""
    layer_scale: float = Field(default=1.0, ge=0)
    """Initial LayerScale of both branches of a block; 0: no LayerScale."""
    bias: bool = True
    """Biases in linear layers and norms of the blocks."""

    @property
    def letters(self) -> str:
        """The mixer of each layer, a letter each."""
        return self.pattern * (self.layers // len(self.pattern))

    @property
    def blocks(self) -> BlockConfig:
        """The settings of the blocks and their norms. A head of S layers has the proportions of the language models: 16
        slots of 28 channels for 64 channels of the width."""
        channels = self.width // self.heads
        slots = {"per_head": max(2, channels // 4), "value_size": max(2, 7 * channels // 16)}
        return BlockConfig.model_validate({
            "layers": self.layers, "heads": self.heads, "width": self.width, "hidden": self.mlp_width or 4 * self.width,
            "tssa": {"denom_bias": "none"}, "softmax": {"rope_theta": 0.0}, "positions": "none",
            "layer_scale": self.layer_scale, "bias": self.bias, **({"slots": slots} if "S" in self.pattern else {}),
        })  # fmt: skip

    @model_validator(mode="after")
    def _fits(self) -> "EncoderConfig":
        if not self.pattern or set(self.pattern) - set(ENCODER_MIXERS):
            raise ValueError(
                f"invalid model.pattern: {self.pattern!r}; use the letters T (TSSA), S (slot memory), A (softmax "
                "attention), C (convolution) and N (no mixer)"
            )
        check_blocks(self.layers, self.heads, self.width, self.pattern)
        if "S" in self.pattern and self.heads % 2:
            raise ValueError(
                f"model.heads {self.heads} is odd, but half of the heads of S layers read backwards; set an even number"
            )
        if (self.vocab_size is None) == (self.patch_size is None):
            raise ValueError("the model reads either ids or images; set model.vocab_size or model.patch_size")
        return self
