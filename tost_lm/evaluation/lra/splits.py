"""Training, validation and test examples of a task."""

from collections.abc import Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import xxhash


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
        """Of a training document."""
        return float(np.mean([len(document) for document in self.train.documents]))


def from_bytes(text: bytes, max_tokens: int) -> np.ndarray:
    """The bytes of a text as ids, cut to `max_tokens`."""
    return np.frombuffer(text[:max_tokens], dtype=np.uint8)


def cut(documents: Sequence[np.ndarray], max_tokens: int) -> list[np.ndarray]:
    return [document[:max_tokens] for document in documents]
