"""Interface of a retrieval task: examples of an exact length, each with a control."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from tost_lm.evaluation.retrieval.haystacks import Text


@dataclass(frozen=True)
class Example:
    """A text that ends in a question, and its answer."""

    prompt: np.ndarray
    """Ids, int64 [T]; the first is the end of text."""
    question: str
    """The end of the prompt, which the answer continues."""
    references: tuple[str, ...]
    """Strings that the answer must contain."""
    options: tuple[tuple[int, ...], ...]
    """Ids of the answers that are compared; a task without a comparison has only the right one."""
    right: int
    """Index of the right option."""


class Task(ABC):
    """Makes the examples of one protocol.

    An example depends only on the seed, the tokenizer, the haystack, and its length, depth and number. It does not
    depend on other cells or on the number of examples.

    Attributes:
        name: of the protocol.
        chance: expected score of a guess that has the right form and ignores the text.
        room: tokens left for the answer.
        depths: depths of the grid's cells; (None,) if depths are drawn.
        text: source of the haystacks; None: they are generated.
        conditions: names of the texts of an example. The first asks the question, the others are its controls.
    """

    name: str
    chance: float
    room: int
    depths: tuple[float | None, ...] = (None,)
    text: Text | None = None
    conditions: tuple[str, ...] = ("needle", "control")

    @abstractmethod
    def needed(self, samples: int) -> int:
        """Maximum over the first `samples` examples of the tokens besides the haystack, with room for the answer."""

    @abstractmethod
    def example(self, length: int, depth: float | None, sample: int) -> tuple[Example, ...]:
        """An example under each condition: the same question, for retrieval with and without the needles in the text.

        The first prompt has `length` − `room` tokens, and no other has more. `length` must be greater than `needed`.

        Raises:
            DataError: `text` is shorter than the length.
        """

    def facts(self, length: int) -> dict[str, int]:
        """More about the cells of a length, for their files."""
        return {}
