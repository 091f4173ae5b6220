"""Gain per token from context, protocol `context_gain@text`.

    whole     [EOT] first half · second half
    control   [EOT] as many tokens of another document · second half
    cut       [EOT] second half

The last tokens of the second half are scored, the same ones under each condition. The halves are from one document. The
gain over the control is what the tokens farther away than half of the length are worth. The gain over `cut` also has
what the length alone does to the model: one that was trained at one length may predict badly at another.
"""

import numpy as np

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.evaluation.context_config import CONTEXT_GAIN
from tost_lm.evaluation.retrieval.haystacks import Text
from tost_lm.evaluation.retrieval.tasks import Example, Task


class ContextGain(Task):
    """The cells of a length show the gain from one range of distances."""

    name, conditions = CONTEXT_GAIN, ("whole", "control", "cut")

    def __init__(self, seed: int, tokenizer: Tokenizer, text: Text, target_tokens: int):
        self.seed, self.eot, self.text, self.room = seed, tokenizer.eot, text, target_tokens
        self.chance = 1 / tokenizer.vocab_size

    def needed(self, samples: int) -> int:
        return 2 * self.room + 2

    def facts(self, length: int) -> dict[str, int]:
        """The number of first tokens that `cut` lacks and the control replaces."""
        return {"removed": length // 2}

    def example(self, length: int, depth: float | None, sample: int) -> tuple[Example, ...]:
        assert self.text is not None
        documents, removed = self.text.documents(length), length // 2
        draws = self.draws(length, sample)
        own, other = (documents[i] for i in draws.choice(len(documents), 2, replace=False))
        start, elsewhere = (int(draws.integers(len(x) - n + 1)) for x, n in ((own, length - 1), (other, removed)))
        window, target_start = own[start : start + length - 1], length - 1 - self.room
        context, target = window[:target_start], tuple(window[target_start:].tolist())

        def make(first: np.ndarray) -> Example:
            return Example(np.concatenate([[self.eot], first, context[removed:]]), "", (), (target,), 0)

        return make(context[:removed]), make(other[elsewhere : elsewhere + removed]), make(context[:0])
