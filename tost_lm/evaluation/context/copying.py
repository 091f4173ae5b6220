"""Copying of a repeated passage, protocol `copying@text`.

    repeated   [EOT] passage · text between · cue → rest of the passage
    control    [EOT] another passage · text between · cue → rest of the passage
    first      [EOT] cue → rest of the passage

The cue is the first 8 tokens of the passage. The same tokens are scored under each condition, at the second occurrence,
after another passage of the same size, and at the first occurrence. Passages and the text between are neighbours in the
text, so the control has the same subject.
"""

import numpy as np

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.evaluation.context_config import COPYING
from tost_lm.evaluation.retrieval.haystacks import Text
from tost_lm.evaluation.retrieval.tasks import Example, Task

CUE_TOKENS = 8


class Copying(Task):
    """The cells of a length have a fixed distance between the occurrences."""

    name, conditions = COPYING, ("repeated", "control", "first")

    def __init__(self, seed: int, tokenizer: Tokenizer, text: Text, target_tokens: int):
        self.seed, self.eot, self.text, self.room = seed, tokenizer.eot, text, target_tokens
        self.chance = 1 / tokenizer.vocab_size
        self.passage_tokens = CUE_TOKENS + target_tokens

    def needed(self, samples: int) -> int:
        return 2 * self.passage_tokens

    def facts(self, length: int) -> dict[str, int]:
        """The distance of a scored token from its first occurrence."""
        return {"distance": length - 1 - self.passage_tokens}

    def example(self, length: int, depth: float | None, sample: int) -> tuple[Example, ...]:
        assert self.text is not None
        source, size = self.text.for_length(length), length - 1 - self.passage_tokens
        draws = self.draws(length, sample)
        start = int(draws.integers(len(source) - size - self.passage_tokens + 1))
        passage, other, between = np.split(
            source[start : start + size + self.passage_tokens], [self.passage_tokens, 2 * self.passage_tokens]
        )
        cue, target = passage[:CUE_TOKENS], tuple(passage[CUE_TOKENS:].tolist())

        def make(*before: np.ndarray) -> Example:
            return Example(np.concatenate([[self.eot], *before, cue]), "", (), (target,), 0)

        return make(passage, between), make(other, between), make()
