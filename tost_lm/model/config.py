"""The shape of a language model, and the published presets."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from tost_lm.config import Section

MIXERS = "TAG"
"""The letters of patterns."""
GATE_CHANNELS = 16
"""G layers, rank of the projection that forget gates come from (arXiv 2312.06635, section 4.4)."""

# arXiv 2412.17810, language models; gpt2-base is the softmax baseline of the same table, which has no LayerScale.
# tost-base-long is ours: nothing in it is sized by a number of positions (docs/experiments.md).
PRESETS: dict[str, dict[str, Any]] = {
    "tost-base": {"pattern": "T", "layers": 12, "heads": 12, "width": 768},
    "tost-medium": {"pattern": "T", "layers": 24, "heads": 16, "width": 1024},
    "tost-base-long": {
        "pattern": "T",
        "layers": 12,
        "heads": 12,
        "width": 768,
        "positions": "none",
        "denom_bias": "head",
    },
    "tost-large": {"pattern": "T", "layers": 36, "heads": 20, "width": 1280},
    "gpt2-base": {"pattern": "A", "layers": 12, "heads": 12, "width": 768, "layer_scale": 0.0, "rope_theta": 0.0},
}


class ModelConfig(Section):
    """A decoder-only transformer: pre-norm blocks of a token mixer and a GELU MLP, tied head."""

    preset: Literal["tost-base", "tost-medium", "tost-large", "gpt2-base", "tost-base-long"] | None = None
    """Fills pattern, layers, heads, width, layer_scale and rope_theta with published values; tost-base-long is tost-base with positions and denom_bias that set no limit to the length. A key given beside it wins."""
    pattern: str = "T"
    """The mixer of each layer, repeated to fill the layers: T token statistics self-attention, A softmax attention, G gated linear attention (on GPUs, with the extra `gla`; one rank a sequence); TTTA has every fourth layer attend."""
    layers: int = Field(gt=0)
    """Number of blocks, a multiple of the pattern's length."""
    heads: int = Field(gt=0)
    """Heads of the mixer; they divide the width."""
    width: int = Field(gt=0)
    """Channels of the residual stream; the MLP is four times as wide."""
    vocab_size: int = Field(default=50304, gt=0)
    """Rows of the token embedding and of the head that is tied to it (GPT-2's 50257, padded to a multiple of 64)."""
    positions: Literal["learned", "sinusoidal", "none"] = "learned"
    """What is added to the token embedding: `learned` as published; `sinusoidal`, computed for any position; `none`."""
    max_positions: int = Field(default=1024, gt=0)
    """Size of what is learned for each position: positions `learned`, denom_bias `position`. A model with either reads no longer sequence (block_size in the released code), one without reads any; evaluation measures in windows of it."""
    membership: Literal["energy-share", "energy-mean", "uniform"] = "energy-share"
    """T layers, how a token's score comes about: `energy-share` as published; `energy-mean` divides by the running mean of the energy, not by its sum, so that scores do not fade with the length; `uniform` gives each head 1/heads, with no effect of temp and denom_bias."""
    denom_bias: Literal["position", "head", "none"] = "position"
    """T layers, what is added to the scores: a number per head and position as published; one per head; nothing."""
    rope_theta: float = Field(default=10000.0, ge=0)
    """A layers, base of the rotary embedding of queries and keys; 0: no rotary embedding."""
    window: int = Field(default=0, ge=0)
    """A layers, a token attends to itself and the window − 1 tokens before it; 0: to all before it."""
    layer_scale: float = Field(default=1e-5, ge=0)
    """Initial LayerScale of both branches of a block; 0: no LayerScale."""
    gelu: Literal["exact", "tanh"] = "exact"
    """Of the MLP: `exact` as published; `tanh`, an approximation, which GPT-2's weights were trained with."""
    bias: bool = False
    """Biases in linear layers and norms."""

    @property
    def letters(self) -> str:
        """Of each layer."""
        return self.pattern * (self.layers // len(self.pattern))

    @property
    def position_limit(self) -> int | None:
        """The longest sequence that the model reads; None: any."""
        by_bias = "T" in self.pattern and self.denom_bias == "position"
        return self.max_positions if self.positions == "learned" or by_bias else None

    @property
    def obstacle_to_tiles(self) -> str | None:
        """Why the model cannot be trained tile by tile; None: it can."""
        if "A" not in self.pattern or self.window:
            return None
        return (
            f"the A layers of model.pattern {self.pattern!r} look at all earlier tokens, so their state grows with the "
            "length: set model.window"
        )

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        name = values.get("preset") if isinstance(values, dict) else None
        return {**PRESETS[name], **values} if isinstance(name, str) and name in PRESETS else values

    @field_validator("pattern")
    @classmethod
    def _letters_are_mixers(cls, pattern: str) -> str:
        if not pattern or set(pattern) - set(MIXERS):
            raise ValueError(
                f"model.pattern {pattern!r}: write it in letters T (TSSA), A (softmax attention) and G (gated linear "
                "attention)"
            )
        return pattern

    @model_validator(mode="after")
    def _shapes_fit(self) -> "ModelConfig":
        if self.width % self.heads:
            raise ValueError(f"model.width {self.width} is not divisible by model.heads {self.heads}")
        if self.layers % len(self.pattern):
            raise ValueError(
                f"model.layers {self.layers} is not a multiple of the {len(self.pattern)} letters of "
                f"model.pattern {self.pattern!r}"
            )
        if "G" in self.pattern and self.width // self.heads % 2:
            raise ValueError(
                f"model.width {self.width} / model.heads {self.heads} is odd, and queries and keys of G layers have half "
                "as many channels: choose other numbers"
            )
        if "A" in self.pattern and self.rope_theta and self.width // self.heads % 2:
            raise ValueError(
                f"model.width {self.width} / model.heads {self.heads} is odd, a rotary embedding turns pairs of "
                "channels: choose other numbers or model.rope_theta = 0"
            )
        return self
