"""The shape of an image classifier, and the settings of `tost vision`: fine-tuning and evaluation in one process."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from tost_lm.config import Section
from tost_lm.mixers.tssa.settings import TssaSettings
from tost_lm.model.config import MAX_LAYERS, ModelConfig, check_blocks
from tost_lm.optim.settings import OptimConfig

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


class ImagesConfig(Section):
    """The images and their labels."""

    source: str
    """A folder of images in subfolders SPLIT/CLASS/, a folder that `datasets` wrote by save_to_disk, or hub:NAME."""
    train_split: str = "train"
    """Split that is trained on; `train+validation` is both."""
    test_split: str = "test"
    """Split that is evaluated. `datasets` calls the split of a subfolder `val` validation."""
    image_column: str | None = None
    """Column of the images; default: the only one."""
    label_column: str | None = None
    """Column of the classes; default: the only one."""
    image_size: int = Field(default=224, gt=0)
    """Side of the square images that the model reads, in pixels."""
    workers: int = Field(default=4, ge=0)
    """Processes that read and transform images; 0: the main process. They do not change the result."""


class FineTuningConfig(Section):
    """The training."""

    epochs: int = Field(gt=0)
    """How often each image is read."""
    batch_size: int = Field(gt=0)
    """Images of an optimizer step; the last batch of an epoch may be smaller."""
    initial_weights: Path | None = None
    """Model to start from: a run folder, step folder, model folder, or a checkpoint of the released vision code. Without it, weights are drawn at random. If its number of classes differs, the head is drawn at random."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """`bfloat16`: autocast over float32 weights."""
    seed: int = Field(default=0, ge=0)
    """Seed of weights that are drawn, of the order of images, of augmentation and of stochastic depth."""
    evaluate_every: int = Field(default=1, gt=0)
    """Epochs between evaluations of the test split; the last epoch is always evaluated."""


class VisionRunConfig(Section):
    """Where the run is recorded; nothing here changes its result."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The run folder is runs/NAME."""
    log_every: int = Field(default=10, gt=0)
    """Steps between rows of metrics.jsonl."""
    max_minutes: float | None = Field(default=None, gt=0)
    """Save and stop before this many minutes have passed since the launch; exit code 75."""


class VisionTrainConfig(Section):
    """Settings of `tost vision train`."""

    model: VisionConfig
    data: ImagesConfig
    optim: OptimConfig = Field(default_factory=OptimConfig)
    train: FineTuningConfig
    run: VisionRunConfig

    @property
    def run_folder(self) -> Path:
        return Path("runs") / self.run.name


class EvalImagesConfig(ImagesConfig):
    """The images to evaluate. Settings that are not given are those of the run."""

    source: str = ""
    """Images, in the form of `tost vision train`; default: that of the run."""


class AccuracyConfig(Section):
    """The evaluation."""

    batch_size: int = Field(default=64, gt=0)
    """Images that the model reads at once; it does not change the result beyond rounding."""


class VisionAnalysisConfig(Section):
    """The analysis. Its images are evenly spaced over their split."""

    drawn_images: int = Field(default=2, gt=0)
    """Images of the test split whose memberships are drawn."""
    rate_images: int = Field(default=64, gt=0)
    """Images of each split whose coding rates are averaged."""


class VisionEvalConfig(Section):
    """Settings of `tost vision eval`."""

    data: EvalImagesConfig = Field(default_factory=EvalImagesConfig)
    accuracy: AccuracyConfig = Field(default_factory=AccuracyConfig)


class VisionAnalyzeConfig(Section):
    """Settings of `tost vision analyze`."""

    data: EvalImagesConfig = Field(default_factory=EvalImagesConfig)
    analysis: VisionAnalysisConfig = Field(default_factory=VisionAnalysisConfig)
