"""Fine-tuning and evaluation of image classifiers, in one process. The settings of `tost vision`."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from tost_lm.config import Section
from tost_lm.model.config import VisionConfig
from tost_lm.optim.settings import OptimConfig


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
