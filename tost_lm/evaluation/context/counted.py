"""Tasks whose cells have a number of shots or passages. The length of a cell follows from it.

Repeated sentences before the text make all prompts of a cell equally long: as if each shot or passage had the tokens of
the longest.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import chain

import numpy as np

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import ConfigError
from tost_lm.evaluation.language_model import ModelFacts
from tost_lm.evaluation.retrieval.haystacks import noise_haystack
from tost_lm.evaluation.retrieval.tasks import Example, Task


class CountedTask(Task):
    """Base class; a task defines its texts.

    Attributes:
        counted: what is counted, a key of `facts`.
        counts: the default counts, ascending.
        frame: maximum number of tokens besides those that are counted, with the end of text and room for the answer.
        longest: maximum number of tokens of a shot or passage.
    """

    counted: str
    counts: Sequence[int]
    frame: int
    longest: int

    def __init__(self, seed: int, tokenizer: Tokenizer):
        self.seed, self.tokenizer = seed, tokenizer
        self.encode = cache(tokenizer.encode)
        self._noise = noise_haystack(tokenizer)

    @abstractmethod
    def texts(self, count: int, draws: np.random.Generator) -> tuple[Example, ...]:
        """An example under each condition, without an end of text and repeated sentences before it."""

    def lengths_of(self, counts: Sequence[int], model: ModelFacts) -> list[int]:
        """The lengths of the cells: for the counts given, else for the default counts that fit the model's positions.

        Raises:
            ConfigError: a length exceeds the model's positions.
        """
        fitting = [count for count in self.counts if self._length(count) <= model.max_positions]
        chosen, limit = counts or fitting or self.counts[:1], model.position_limit
        for count in chosen:
            if limit is not None and self._length(count) > limit:
                raise ConfigError(
                    f"context.{self.counted}: {count} take {self._length(count):,} tokens in {self.name}, more than "
                    f"the model's positions ({limit:,}); lower it, or leave the task out of context.tasks"
                )
        return [self._length(count) for count in chosen]

    def needed(self, samples: int) -> int:
        return self.frame

    def facts(self, length: int) -> dict[str, int]:
        return {self.counted: (length - self.frame) // self.longest}

    def example(self, length: int, depth: float | None, sample: int) -> tuple[Example, ...]:
        count = self.facts(length)[self.counted]
        draws = self.draws(count, sample)

        def fill(text: Example) -> Example:
            noise = self._noise(length - self.room - 1 - len(text.prompt))
            return replace(text, prompt=np.concatenate([[self.tokenizer.eot], noise, text.prompt]).astype(np.int64))

        return tuple(map(fill, self.texts(count, draws)))

    def join(self, strings: Sequence[str]) -> np.ndarray:
        """Ids of strings that are encoded separately, so that a value has the same ids everywhere: int64."""
        return np.array(list(chain.from_iterable(map(self.encode, strings))), np.int64)

    def _length(self, count: int) -> int:
        return self.frame + count * self.longest
