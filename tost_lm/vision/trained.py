"""A classifier that `tost vision train` wrote, and the images that it is evaluated on."""

from pathlib import Path
from typing import Any

from tost_lm.checkpointing.format import SETTINGS
from tost_lm.config import load_config, validate
from tost_lm.errors import CheckpointError, DataError
from tost_lm.files import sha256_file
from tost_lm.version import VERSION
from tost_lm.vision.config import EvalImagesConfig, ImagesConfig, VisionTrainConfig
from tost_lm.vision.images import Images, open_images
from tost_lm.vision.training import stored_classes

PROTOCOL = "images"


def images_of(checkpoint: Path, given: EvalImagesConfig) -> tuple[ImagesConfig, Images]:
    """Settings and images of the test split: those of the run, except the settings that are given.

    Raises:
        CheckpointError: `tost vision train` did not write the checkpoint.
        ConfigError, DataError: as `open_images`, or the classes are others.
    """
    if not (checkpoint / SETTINGS).is_file():
        raise CheckpointError(f"{checkpoint}: not a checkpoint of tost vision train; fine-tune the model first")
    recorded = load_config(VisionTrainConfig, checkpoint / SETTINGS).data
    tree = {**recorded.model_dump(), **given.model_dump(include=given.model_fields_set)}
    data = validate(ImagesConfig, tree, "data")
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
