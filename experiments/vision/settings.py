"""The shape of an image classifier."""

from typing import Any, Literal

from pydantic import Field, model_validator

from tost_lm.config import Section
from tost_lm.mixers.tssa.settings import TssaSettings
from tost_lm.model.config import MAX_LAYERS, ModelConfig, check_blocks

# arXiv 2412.17810 and the released vision code, whose names are tost_cab_tiny_12_p16 and so on. LayerScale starts there
# at 1 with 12 layers and at 1e-5 with 24.
VISION_PRESETS: dict[str, dict[str, Any]] = {
    "tost-vision-tiny-12": {"layers": 12, "heads": 4, "width": 192, "layer_scale": 1.0},
    "tost-vision-small-12": {"layers": 12, "heads": 8, "width": 384, "layer_scale": 1.0},
    "tost-vision-tiny-24": {"layers": 24, "heads": 4, "width": 192, "layer_scale": 1e-5},
    "tost-vision-small-24": {"layers": 24, "heads": 8, "width": 384, "layer_scale": 1e-5},
    "tost-vision-medium-24": {"layers": 24, "heads": 8, "width": 512, "layer_scale": 1e-5},
    "tost-vision-large-24": {"layers": 24, "heads": 16, "width": 768, "layer_scale": 1e-5},
}
VisionPreset = Literal[
    "tost-vision-tiny-12", "tost-vision-small-12", "tost-vision-tiny-24", "tost-vision-small-24",
    "tost-vision-medium-24", "tost-vision-large-24",
]  # fmt: skip


class VisionConfig(Section):
    """An image classifier: convolutions, blocks of bidirectional TSSA, two blocks of class attention, a head."""

    preset: VisionPreset | None = None
    """Sets layers, heads, width and layer_scale to those of a released model. Settings that are given explicitly override the preset."""
    classes: int = Field(default=1000, gt=0)
    """Number of classes."""
    layers: int = Field(gt=0, le=MAX_LAYERS)
    """Number of TSSA blocks; the two class-attention blocks follow them."""
    heads: int = Field(gt=0)
    """Number of heads of the mixer; must divide model.width."""
    width: int = Field(gt=0)
    """Channels of the residual stream (hidden size)."""
    patch_size: Literal[8, 16] = 16
    """Side of the square that becomes a token, in pixels: a convolution of stride 2 for each factor of 2."""
    layer_scale: float = Field(default=1.0, gt=0)
    """Initial LayerScale of both branches of a block."""
    drop_path: float = Field(default=0.0, ge=0, lt=1)
    """Probability that training drops a branch of a TSSA block for an image (stochastic depth)."""

    @property
    def convolutions(self) -> int:
        """The number of convolutions of stride 2."""
        return self.patch_size.bit_length() - 1

    @property
    def blocks(self) -> ModelConfig:
        """The settings of the blocks and their norms."""
        return ModelConfig(
            layers=self.layers, heads=self.heads, width=self.width, positions="none",
            tssa=TssaSettings(denom_bias="none"), layer_scale=self.layer_scale, bias=True,
        )  # fmt: skip

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        name = values.get("preset") if isinstance(values, dict) else None
        return {**VISION_PRESETS[name], **values} if isinstance(name, str) and name in VISION_PRESETS else values

    @model_validator(mode="after")
    def _fits(self) -> "VisionConfig":
        check_blocks(self.layers, self.heads, self.width, "T")
        if self.width % (factor := self.patch_size // 2):
            raise ValueError(
                f"model.width {self.width} is not a multiple of {factor}, half of model.patch_size: the convolutions "
                "double their channels; change it"
            )
        return self
