"""The text tasks of the Long-Range Arena, byte by byte: classes of reviews, and pairs of articles.

Ids are bytes. Text: the folder aclImdb of the Large Movie Review Dataset (ai.stanford.edu/~amaas/data/sentiment), with
`train/neg/*.txt` and so on. The published task validates on the test split; here every tenth training file of a class
is held out instead. Retrieval: `new_aan_pairs.train.tsv` of the release and those of eval and test, without a header; a
line has label, two names and two texts.
"""

from pathlib import Path

import numpy as np

from tost_lm.errors import DataError
from tost_lm.evaluation.lra.splits import Split, Task, from_bytes

BYTES = 256
CLASSES = ("neg", "pos")
HELD_OUT = 10
PAIRS = ("new_aan_pairs.train.tsv", "new_aan_pairs.eval.tsv", "new_aan_pairs.test.tsv")
"""Training, validation and test examples."""


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
