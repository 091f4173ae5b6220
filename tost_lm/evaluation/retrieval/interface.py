"""What a retrieval task is: examples of an exact length, each with its control."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from tost_lm.evaluation.retrieval.haystacks import Text


@dataclass(frozen=True)
class Example:
    """A text that ends in a question, and what answers it."""

    prompt: np.ndarray
    """Ids, int64 [T]; the first is the end of text."""
    question: str
    """Its end, which the answer goes on with."""
    references: tuple[str, ...]
    """What the answer must name."""
    options: tuple[tuple[int, ...], ...]
    """Ids of the answers that are compared; where there is nothing to compare, of the right one alone."""
    right: int
    """Which of the options is the answer."""


class Task(ABC):
    """Makes the examples of one protocol.

    An example depends on the settings' seed, the tokenizer, the haystack, its length, depth and number, and on nothing
    else: neither on other cells nor on how many examples there are.

    Attributes: `name`; `chance`, the expected score of who guesses an answer of the right form without having read the
    text; `room`, tokens that are left for the answer; `depths`, those of the grid's cells, or None alone where they are
    drawn; `text`, that the haystacks are taken from, if they are.
    """

    name: str
    chance: float
    room: int
    depths: tuple[float | None, ...] = (None,)
    text: Text | None = None

    @abstractmethod
    def needed(self, samples: int) -> int:
        """Tokens that any of the first examples takes besides its haystack, room for the answer among them."""

    @abstractmethod
    def example(self, length: int, depth: float | None, sample: int) -> tuple[Example, Example]:
        """An example and its control: the same question to a haystack without what it asks for.

        Both prompts have `length` − `room` tokens. `length` must be greater than what is `needed`.

        Raises:
            DataError: `text` is shorter than the length.
        """
