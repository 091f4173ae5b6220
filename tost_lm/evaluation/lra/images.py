"""The image tasks of the Long-Range Arena: an image is its grey values row by row, a token each.

Image: CIFAR-10 in its binary form (cifar-10-binary.tar.gz), grey as TensorFlow's `rgb_to_grayscale` computes it:
0.2989 red + 0.5870 green + 0.1140 blue. The last tenth of the training images is the validation split. Pathfinder: a
folder of the release's PNG files, such as pathfinder32/curv_contour_length_14, whose `metadata/N.npy` are texts with a
line for each image: folder, name, number, label and more. Images in the order of N are split 80/10/10.
"""

from pathlib import Path

import numpy as np

from tost_lm.errors import ConfigError, DataError
from tost_lm.evaluation.lra.splits import Split, Task, cut

GREYS = 256
CIFAR_SIDE, CIFAR_CLASSES = 32, 10
CIFAR_TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
CIFAR_TEST = "test_batch.bin"
GREY_OF_RGB = (0.2989, 0.5870, 0.1140)


def load_cifar(folder: Path, max_tokens: int) -> Task:
    """The task `image`. Raises DataError when a file is missing or malformed."""
    batches = [_read_cifar(folder / name, max_tokens) for name in CIFAR_TRAIN]
    documents = [document for batch in batches for document in batch.documents]
    labels = np.concatenate([batch.labels for batch in batches])
    last = max(1, len(labels) // 10)
    train, valid = Split(documents[:-last], labels[:-last]), Split(documents[-last:], labels[-last:])
    return Task(CIFAR_CLASSES, GREYS, train, valid, _read_cifar(folder / CIFAR_TEST, max_tokens))


def load_pathfinder(folder: Path, max_tokens: int) -> Task:
    """The task `pathfinder`. Raises DataError when a file is missing or malformed."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise ConfigError("data.task pathfinder reads PNG files with pillow; pip install pillow") from None
    documents, labels = [], []
    for metadata in _metadata(folder):
        for number, line in enumerate(metadata.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            fields = line.split()
            if len(fields) < 4 or fields[3] not in ("0", "1"):
                raise DataError(f"{metadata}: line {number} names no image and label; unpack the release again")
            path = folder / fields[0] / fields[1]
            try:
                with Image.open(path) as image:
                    documents.append(np.asarray(image.convert("L")).reshape(-1))
            except FileNotFoundError:
                raise DataError(f"{path}: no such file, but {metadata} names it; unpack the release again") from None
            except UnidentifiedImageError:
                raise DataError(f"{path}: not an image; unpack the release again") from None
            labels.append(int(fields[3]))
    first, second = 8 * len(labels) // 10, 9 * len(labels) // 10
    if not 0 < first < second < len(labels):
        raise DataError(f"{folder}: {len(labels)} images are too few for three splits; unpack the release again")
    documents, labels = cut(documents, max_tokens), np.array(labels)
    parts = (slice(first), slice(first, second), slice(second, None))
    return Task(2, GREYS, *(Split(documents[part], labels[part]) for part in parts))


def _metadata(folder: Path) -> list[Path]:
    paths = [path for path in (folder / "metadata").glob("*.npy") if path.stem.isdigit()]
    if not paths:
        raise DataError(
            f"{folder / 'metadata'}: no files N.npy; set data.folder to a folder such as "
            "pathfinder32/curv_contour_length_14 of the release"
        )
    return sorted(paths, key=lambda path: int(path.stem))


def _read_cifar(path: Path, max_tokens: int) -> Split:
    pixels = CIFAR_SIDE**2
    try:
        records = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    except FileNotFoundError:
        raise DataError(
            f"{path}: no such file; set data.folder to the folder cifar-10-batches-bin of cifar-10-binary.tar.gz"
        ) from None
    if not len(records) or len(records) % (1 + 3 * pixels):
        raise DataError(f"{path}: not records of {1 + 3 * pixels:,} bytes; download cifar-10-binary.tar.gz again")
    records = records.reshape(-1, 1 + 3 * pixels)
    if records[:, 0].max() >= CIFAR_CLASSES:
        raise DataError(f"{path}: has labels above {CIFAR_CLASSES - 1}; download cifar-10-binary.tar.gz again")
    colours = records[:, 1:].reshape(-1, 3, pixels) / 255.0
    grey = np.tensordot(colours, GREY_OF_RGB, axes=(1, 0))
    documents = (grey * (GREYS - 0.5)).astype(np.uint8)  # as TensorFlow converts a fraction
    return Split(cut(list(documents), max_tokens), records[:, 0].astype(np.int64))
