"""Needle in a haystack, protocol `needle@words` (after Kamradt 2023, small enough for a small model).

    [EOT] haystack … The secret word of NAME is WORD. … haystack ⏎ The secret word of NAME is → WORD

The haystack is text in a fixed order. The prompt and the room for the longest word have exactly the cell's length in
tokens. The needle is at the cell's depth, moved back to the end of a line or sentence. WORD is one of ten words. Beside
the scores of all tasks, `choice` is whether the right word is the most likely of the ten (by the total log-probability
of its tokens; chance 10 %). The control has a haystack of the same length without the needle.
"""

from collections.abc import Sequence

import numpy as np

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.evaluation.config import NEEDLE
from tost_lm.evaluation.retrieval.haystacks import Text, insert_needles, text_haystack
from tost_lm.evaluation.retrieval.interface import Example, Task

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Iris", "Jack")
WORDS = ("apple", "river", "table", "green", "music", "stone", "horse", "paper", "night", "glass")


class NeedleTask(Task):
    """One needle at each depth of a grid."""

    name, chance = NEEDLE, 1 / len(WORDS)

    def __init__(self, seed: int, tokenizer: Tokenizer, text: Text, depths: Sequence[float]):
        self.seed, self.tokenizer, self.text = seed, tokenizer, text
        self.depths = tuple(depths)
        self.candidates = tuple(tuple(tokenizer.encode(f" {word}")) for word in WORDS)
        self.room = max(map(len, self.candidates))

    def needed(self, samples: int) -> int:
        return max(
            1 + len(self._needle(name, word)) + len(self._question(name)) + self.room
            for name in NAMES for word in range(len(WORDS))
        )  # fmt: skip

    def example(self, length: int, depth: float | None, sample: int) -> tuple[Example, Example]:
        assert depth is not None
        assert self.text is not None
        draws = np.random.default_rng((self.seed, length, round(depth * 1e6), sample))
        name, word = NAMES[draws.integers(len(NAMES))], int(draws.integers(len(WORDS)))
        needle, question = self._needle(name, word), self._question(name)
        tokens = length - self.room - 1 - len(question)
        haystack = text_haystack(self.text, length, tokens, draws)
        with_needle = insert_needles(self.tokenizer, haystack(tokens - len(needle)), [needle], [depth])

        def make(text: np.ndarray) -> Example:
            prompt = np.concatenate([[self.tokenizer.eot], text, question])
            return Example(prompt, _line(name), (WORDS[word],), self.candidates, word)

        return make(with_needle), make(haystack(tokens))

    def _needle(self, name: str, word: int) -> list[int]:
        # Encoded separately, so that the word has the ids of the candidate.
        return [*self.tokenizer.encode(f" {_line(name)}"), *self.candidates[word], *self.tokenizer.encode(".\n")]

    def _question(self, name: str) -> list[int]:
        return [*self.tokenizer.encode("\n"), *self.tokenizer.encode(_line(name))]


def _line(name: str) -> str:
    return f"The secret word of {name} is"
