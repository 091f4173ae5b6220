"""Labelled images from folders and `datasets`, and the released transforms."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tost_lm.errors import ConfigError, DataError, did_you_mean, install_hint
from tost_lm.extra.vision.settings import ImagesConfig

HUB = "hub:"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's colours."""
RANDAUGMENT_OPERATIONS, RANDAUGMENT_MAGNITUDE = 2, 14

Transform = Callable[[Any], Tensor]
"""From a PIL image in RGB to [3, height, width], float32. Random draws come from torch's generator."""


def augmentation(image_size: int) -> Transform:
    """The released recipe of fine-tuning: crops, flips and RandAugment. Raises ConfigError without torchvision."""
    v2 = _torchvision()
    return v2.Compose([
        v2.RandomResizedCrop(image_size),
        v2.RandomHorizontalFlip(),
        v2.RandAugment(RANDAUGMENT_OPERATIONS, RANDAUGMENT_MAGNITUDE),
        *_normalize(v2),
    ])  # fmt: skip


def preprocessing(image_size: int) -> Transform:
    """Resize both sides without a crop, as the released code. Raises ConfigError without torchvision."""
    v2 = _torchvision()
    return v2.Compose([v2.Resize((image_size, image_size)), *_normalize(v2)])


@dataclass(frozen=True)
class Images:
    """The images of a split."""

    name: str
    """Source and split, for messages."""
    rows: Any
    """A `datasets.Dataset`, whose images are not decoded."""
    column: str
    labels: np.ndarray
    """int64 [N]."""
    classes: tuple[str, ...]
    """Their names, in the order of the labels."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the names of classes and of all labels."""
        return hashlib.sha256(json.dumps([self.classes, self.labels.tolist()]).encode()).hexdigest()

    def decode(self, index: int) -> Any:
        """A PIL image in RGB, upright. Raises DataError if it is damaged."""
        from PIL import Image, ImageOps

        stored = self.rows[index][self.column]
        try:
            with Image.open(stored["path"] if stored["bytes"] is None else BytesIO(stored["bytes"])) as image:
                return ImageOps.exif_transpose(image).convert("RGB")
        except Exception as error:  # the formats raise errors of many types
            raise DataError(
                f"{self.name}: image {index} ({stored['path']}) cannot be read: {error}; remove or replace it"
            ) from None


def open_images(config: ImagesConfig, split: str) -> Images:
    """The images of a split.

    Raises:
        ConfigError: `datasets` or Pillow is missing, or there is no such split or column.
        DataError: the source cannot be read, or has no labelled images.
    """
    found = _load(config.source)
    names = split.split("+")
    for name in names:
        if name not in found:
            hint = did_you_mean(name, found)
            raise ConfigError(f"{config.source}: no split {name}{hint}; it has {', '.join(found)}")
    import datasets

    rows = datasets.concatenate_datasets([found[name] for name in names])
    image = _only_column(config.source, rows.features, datasets.Image, "image_column", config.image_column)
    label = _only_column(config.source, rows.features, datasets.ClassLabel, "label_column", config.label_column)
    labels = np.asarray(rows.with_format("numpy")[label][:], dtype=np.int64)
    if not len(labels) or labels.min() < 0:
        raise DataError(f"{config.source}: split {split} has no images, or images without a class; label all of them")
    undecoded = rows.cast_column(image, datasets.Image(decode=False))
    return Images(f"{config.source}, split {split}", undecoded, image, labels, tuple(rows.features[label].names))


def batches(
    images: Images, transform: Transform, batch_size: int, workers: int, order: np.ndarray, stream: str = ""
) -> "DataLoader[Any]":
    """Batches of images [B, 3, height, width] and labels [B] in some order; iterate over `checked(batches(…))`.

    Args:
        stream: names the random numbers of transforms. An image is a function of it and of its own index, so the result
            does not depend on workers or on where a run resumed.
    """
    return DataLoader(
        _Examples(images, transform, stream),
        batch_size,
        sampler=order.tolist(),
        num_workers=workers,
        collate_fn=_collate,
        pin_memory=torch.cuda.is_available(),
    )


def checked(loader: "DataLoader[Any]") -> Any:
    """The batches of a loader. Raises DataError in this process when a worker found a damaged image."""
    for batch in loader:
        if isinstance(batch, DataError):
            raise batch
        yield batch


class _Examples(Dataset[Any]):
    def __init__(self, images: Images, transform: Transform, stream: str) -> None:
        self._images, self._transform, self._stream = images, transform, stream

    def __getitem__(self, index: int) -> Any:
        try:
            image = self._images.decode(index)
        except DataError as error:
            return error  # an exception of a worker would be printed with its traceback
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(self._stream, index))
            return self._transform(image), int(self._images.labels[index])


def _collate(examples: Sequence[Any]) -> Any:
    if errors := [example for example in examples if isinstance(example, DataError)]:
        return errors[0]
    return torch.stack([image for image, _ in examples]), torch.tensor([label for _, label in examples])


def seed_of(*key: str | int) -> int:
    """A seed of torch's generator, a hash of the key."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, key)).encode()) >> 1


def _load(source: str) -> Any:
    """The splits of a source by name."""
    try:
        import datasets
        import PIL  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"images need {error.name}; {install_hint('vision')}") from None
    datasets.disable_progress_bars()
    folder = Path(source)
    if not source.startswith(HUB) and not folder.is_dir():
        raise ConfigError(f"data.source {source}: no such folder; give a folder, or hub:NAME for a data set of the hub")
    try:
        if source.startswith(HUB):
            return datasets.load_dataset(source.removeprefix(HUB))
        if (folder / "dataset_dict.json").is_file():
            return datasets.load_from_disk(source)
        return datasets.load_dataset("imagefolder", data_dir=source)
    except Exception as error:  # the library raises its own errors and those of the network
        problem = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"data.source {source}: cannot be read by datasets: {problem}; see docs/vision.md") from None


def _only_column(source: str, features: Any, kind: type, setting: str, wanted: str | None) -> str:
    found = [name for name, feature in features.items() if isinstance(feature, kind)]
    if wanted in found or (wanted is None and len(found) == 1):
        return wanted or found[0]
    if not found:
        raise DataError(
            f"{source}: has no column for data.{setting}; put images of 2 classes or more into SPLIT/CLASS/"
        )
    if wanted:
        raise ConfigError(f"{source}: data.{setting} {wanted} is none of its columns of this kind: {', '.join(found)}")
    raise ConfigError(f"{source}: has {len(found)} columns for data.{setting} ({', '.join(found)}); set one")


def _normalize(v2: Any) -> list[Any]:
    return [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]


def _torchvision() -> Any:
    try:
        from torchvision.transforms import v2  # pyright: ignore[reportMissingImports]
    except (ImportError, RuntimeError) as error:  # RuntimeError: it was built for another version of torch
        problem = str(error).splitlines()[0]
        raise ConfigError(f"images need torchvision ({problem}); {install_hint('vision')}") from None
    return v2
