"""The shape of a language model, and the published presets."""

from typing import Any, Literal

from pydantic import Field, model_validator

from tost_lm.config import Section

# arXiv 2412.17810, language models; gpt2-base is the softmax baseline of the same table, which has no LayerScale.
PRESETS: dict[str, dict[str, Any]] = {
    "tost-base": {"mixer": "tssa", "layers": 12, "heads": 12, "width": 768},
    "tost-medium": {"mixer": "tssa", "layers": 24, "heads": 16, "width": 1024},
    "tost-large": {"mixer": "tssa", "layers": 36, "heads": 20, "width": 1280},
    "gpt2-base": {"mixer": "softmax", "layers": 12, "heads": 12, "width": 768, "layer_scale": 0.0},
}


class ModelConfig(Section):
    """A decoder-only transformer: pre-norm blocks of a token mixer and a GELU MLP, learned positions, tied head."""

    preset: Literal["tost-base", "tost-medium", "tost-large", "gpt2-base"] | None = None
    """Fills mixer, layers, heads, width and layer_scale with published values; a key given beside it wins."""
    mixer: Literal["tssa", "softmax"] = "tssa"
    """`tssa`: causal token statistics self-attention as published; `softmax`: causal softmax attention, the baseline."""
    layers: int = Field(gt=0)
    """Number of blocks."""
    heads: int = Field(gt=0)
    """Heads of the mixer; they divide the width."""
    width: int = Field(gt=0)
    """Channels of the residual stream; the MLP is four times as wide."""
    vocab_size: int = Field(default=50304, gt=0)
    """Rows of the token embedding and of the head that is tied to it (GPT-2's 50257, padded to a multiple of 64)."""
    max_positions: int = Field(default=1024, gt=0)
    """Learned positions, the longest sequence that the model reads (block_size in the released code)."""
    layer_scale: float = Field(default=1e-5, ge=0)
    """Initial LayerScale of both branches of a block; 0: no LayerScale."""
    bias: bool = False
    """Biases in linear layers and norms."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        name = values.get("preset") if isinstance(values, dict) else None
        return {**PRESETS[name], **values} if isinstance(name, str) and name in PRESETS else values

    @model_validator(mode="after")
    def _heads_divide_width(self) -> "ModelConfig":
        if self.width % self.heads:
            raise ValueError(f"model.width {self.width} is not divisible by model.heads {self.heads}")
        return self
