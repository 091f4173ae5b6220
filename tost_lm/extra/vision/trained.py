"""A classifier and the images that it is evaluated on."""

from pathlib import Path
from typing import Any

from tost_lm.checkpointing.format import SETTINGS
from tost_lm.config import load_config, validate
from tost_lm.errors import CheckpointError, ConfigError, DataError
from tost_lm.extra.vision.images import Images, open_images
from tost_lm.extra.vision.settings import EvalImagesConfig, ImagesConfig, VisionTrainConfig
from tost_lm.extra.vision.training import stored_classes
from tost_lm.files import sha256_file
from tost_lm.version import VERSION

PROTOCOL, ANALYSIS = "images", "vision_analysis"
"""Names of the results."""


def data_of(checkpoint: Path, given: EvalImagesConfig) -> ImagesConfig:
    """Settings of the images: those of the run of `tost vision train`, except the settings that are given.

    Raises:
        ConfigError: there is no such run, and no source is given.
    """
    recorded = {}
    if (checkpoint / SETTINGS).is_file():
        recorded = load_config(VisionTrainConfig, checkpoint / SETTINGS).data.model_dump()
    elif not given.source:
        raise ConfigError(f"{checkpoint}: was not trained on images by tost vision train; give data.source=FOLDER")
    return validate(ImagesConfig, {**recorded, **given.model_dump(include=given.model_fields_set)}, "data")


def images_of(checkpoint: Path, given: EvalImagesConfig) -> tuple[ImagesConfig, Images]:
    """Settings and images of the test split: those of the run, except the settings that are given.

    Raises:
        CheckpointError: `tost vision train` did not write the checkpoint.
        ConfigError, DataError: as `open_images`, or the classes are others.
    """
    if not (checkpoint / SETTINGS).is_file():
        raise CheckpointError(f"{checkpoint}: not a checkpoint of tost vision train; fine-tune the model first")
    data = data_of(checkpoint, given)
    images, classes = open_images(data, data.test_split), stored_classes(checkpoint)
    if list(images.classes) != classes:
        raise DataError(
            f"{images.name}: has other classes than {checkpoint}: {', '.join(classes[:5])}, …; give images of these"
        )
    return data, images


def identity_of(checkpoint: Path, data: ImagesConfig, images: Images) -> dict[str, Any]:
    """Everything that a result depends on."""
    return {
        "tost_lm": VERSION,
        "checkpoint": checkpoint.name,
        "checkpoint_sha256": sha256_file(checkpoint / "manifest.json"),
        "images_sha256": images.fingerprint,
        "data": data.model_dump(mode="json", exclude={"workers"}),
    }
