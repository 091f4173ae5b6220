"""The five tasks of the Long-Range Arena: their splits, and the files of the release that they are read from.

ListOps: `basic_train.tsv`, `basic_val.tsv` and `basic_test.tsv`: a header, then lines of source, tab and target; they
are generated if the folder does not exist. Text: the folder aclImdb of the Large Movie Review Dataset
(ai.stanford.edu/~amaas/data/sentiment), with `train/neg/*.txt` and so on. The published task validates on the test
split; here every tenth training file of a class is held out instead. Retrieval: `new_aan_pairs.train.tsv` and those
of eval and test, without a header; a line has label, two names and two texts. The ids of both tasks are bytes.

An image is its grey values row by row, a token each. Image: CIFAR-10 in its binary form (cifar-10-binary.tar.gz),
grey as TensorFlow's `rgb_to_grayscale` computes it: 0.2989 red + 0.5870 green + 0.1140 blue. The last tenth of the
training images is the validation split. Pathfinder: a folder of PNG files, such as
pathfinder32/curv_contour_length_14, whose `metadata/N.npy` are texts with a line for each image: folder, name,
number, label and more. Images in the order of N are split 80/10/10.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import xxhash

from tost_lm.errors import ConfigError, DataError
from tost_lm.extra.lra import listops
from tost_lm.extra.lra.settings import ListOpsConfig, LraConfig

BYTES = 256
CLASSES = ("neg", "pos")
HELD_OUT = 10
PAIRS = ("new_aan_pairs.train.tsv", "new_aan_pairs.eval.tsv", "new_aan_pairs.test.tsv")
"""Training, validation and test examples."""
GREYS = 256
CIFAR_SIDE, CIFAR_CLASSES = 32, 10
CIFAR_TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
CIFAR_TEST = "test_batch.bin"
GREY_OF_RGB = (0.2989, 0.5870, 0.1140)


class Split(NamedTuple):
    """Examples of one split."""

    documents: Sequence[np.ndarray]
    """Ids of each document, uint8. With two towers, an example is documents 2n and 2n + 1."""
    labels: np.ndarray
    """Class of each example, int64 [examples]."""


class Task:
    """A task: its splits and what a model must know of it."""

    def __init__(
        self, classes: int, vocab_size: int, train: Split, valid: Split, test: Split, *, towers: Literal[1, 2] = 1
    ) -> None:
        self.classes, self.vocab_size = classes, vocab_size
        self.towers: Literal[1, 2] = towers
        self.train, self.valid, self.test = train, valid, test

    @cached_property
    def digest(self) -> str:
        """A hash of all examples in their order."""
        digest = xxhash.xxh3_128()
        for split in (self.train, self.valid, self.test):
            lengths = np.array([len(document) for document in split.documents])
            for array in (split.labels, lengths, np.concatenate(split.documents)):
                digest.update(array.tobytes())
        return digest.hexdigest()

    @property
    def majority_accuracy(self) -> float:
        """Accuracy on the test split of the most frequent class of the training split."""
        return float((self.test.labels == np.bincount(self.train.labels).argmax()).mean())

    @property
    def mean_tokens(self) -> float:
        """Mean number of tokens of a training document."""
        return float(np.mean([len(document) for document in self.train.documents]))


def load(config: LraConfig) -> Task:
    """The task of the settings. Raises DataError when its files are missing or malformed."""
    folder, tokens = config.data.home, config.data.tokens
    match config.data.task:
        case "listops":
            task = load_listops(config.listops, folder, tokens)
        case "text":
            task = load_reviews(folder, tokens)
        case "retrieval":
            task = load_pairs(folder, tokens)
        case "image":
            task = load_cifar(folder, tokens)
        case "pathfinder":
            task = load_pathfinder(folder, tokens)
    return task


def load_listops(config: ListOpsConfig, folder: Path, max_tokens: int) -> Task:
    """The task in the folder; generated if the folder does not exist.

    Raises:
        DataError: a file is missing or malformed, or the folder has examples of other settings.
    """
    if not folder.exists():
        listops.generate(config, folder)
    _check_settings(config, folder)
    train, valid, test = (
        _read_listops(folder / listops.FILES[name], max_tokens) for name in ("train", "valid", "test")
    )
    return Task(10, len(listops.TOKENS), train, valid, test)


def load_reviews(folder: Path, max_tokens: int) -> Task:
    """The task `text`. Raises DataError when a folder has no texts."""
    of_class = [_texts(folder / "train" / name) for name in CLASSES]
    train = [[path for i, path in enumerate(paths) if i % HELD_OUT] for paths in of_class]
    valid = [paths[::HELD_OUT] for paths in of_class]
    test = [_texts(folder / "test" / name) for name in CLASSES]
    splits = (_read_texts(paths, max_tokens) for paths in (train, valid, test))
    return Task(len(CLASSES), BYTES, *splits)


def load_pairs(folder: Path, max_tokens: int) -> Task:
    """The task `retrieval`. Raises DataError when a file is missing or malformed."""
    train, valid, test = (_read_pairs(folder / file, max_tokens) for file in PAIRS)
    return Task(2, BYTES, train, valid, test, towers=2)


def _texts(folder: Path) -> list[Path]:
    paths = sorted(folder.glob("*.txt"))
    if len(paths) < 2:
        raise DataError(f"{folder}: fewer than two texts (*.txt); set data.folder to the unpacked folder aclImdb")
    return paths


def _read_texts(of_class: list[list[Path]], max_tokens: int) -> Split:
    documents, labels = [], []
    for label, paths in enumerate(of_class):
        for path in paths:
            document = from_bytes(path.read_bytes(), max_tokens)
            if not len(document):
                raise DataError(f"{path}: empty; unpack the data set again")
            documents.append(document)
            labels.append(label)
    return Split(documents, np.array(labels))


def _read_pairs(path: Path, max_tokens: int) -> Split:
    documents, labels = [], []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                fields = line.rstrip(b"\r\n").split(b"\t")
                if len(fields) != 5 or fields[0] not in (b"0", b"1", b"0.0", b"1.0") or not all(fields[3:]):
                    raise DataError(
                        f"{path}: line {number} is not a label of 0 or 1, two names and two texts, separated by tabs; "
                        "unpack the release again"
                    )
                labels.append(int(float(fields[0])))
                documents += [from_bytes(text, max_tokens) for text in fields[3:]]
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; set data.folder to the folder with {', '.join(PAIRS)}") from None
    if not labels:
        raise DataError(f"{path}: empty; unpack the release again")
    return Split(documents, np.array(labels))


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


def _check_settings(config: ListOpsConfig, folder: Path) -> None:
    """The release's files have no settings."""
    path = folder / listops.SETTINGS
    if not path.exists():
        return
    theirs, ours = json.loads(path.read_bytes()), config.model_dump()
    for name, value in ours.items():
        if theirs.get(name) != value:
            raise DataError(
                f"{folder}: generated with listops.{name} = {theirs.get(name)}, not {value}; set data.folder to "
                "another folder, or delete this one"
            )


def _read_listops(path: Path, max_tokens: int) -> Split:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        names = ", ".join(listops.FILES.values())
        raise DataError(
            f"{path}: no such file; set data.folder to a folder with {names}, or to a new one to generate them"
        ) from None
    if len(lines) < 2 or lines[0] != listops.HEADER:
        raise DataError(f"{path}: does not start with the header Source, tab, Target; give a file of the release")
    id_of, without_parentheses = {token: i for i, token in enumerate(listops.TOKENS)}, str.maketrans("", "", "()")
    documents, labels = [], []
    for number, line in enumerate(lines[1:], 2):
        try:
            source, target = line.split("\t")
            ids = [id_of[token] for token in source.translate(without_parentheses).split()]
            labels.append(range(10)[int(target)])
            documents.append(np.array(ids, dtype=np.uint8))
        except (ValueError, KeyError, IndexError):
            raise DataError(f"{path}: line {number} is no ListOps example; download or generate it again") from None
    return Split(cut(documents, max_tokens), np.array(labels))


def from_bytes(text: bytes, max_tokens: int) -> np.ndarray:
    """The bytes of a text as ids, cut to `max_tokens`."""
    return np.frombuffer(text[:max_tokens], dtype=np.uint8)


def cut(documents: Sequence[np.ndarray], max_tokens: int) -> list[np.ndarray]:
    return [document[:max_tokens] for document in documents]
