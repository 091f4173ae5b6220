"""Variable tracking, protocol `vt@own-words`: RULER's structure (arXiv 2404.06654) with sentences of our own.

    [EOT] The text below sets variables. Keep track of which of them have the same value.
    noise … VAR ABCDE = 12345 … noise … VAR FGHIJ = VAR ABCDE … noise
    Question: Which variables have the value 12345?
    Answer: The variables with the value 12345 are → ABCDE, FGHIJ, … and UVWXY

There is one chain of four hops. Its lines are in order, at drawn depths. The answer names all five variables. The
prompt has no worked example. The control has no line of the chain.
"""

from itertools import islice, pairwise

import numpy as np

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.evaluation.retrieval.haystacks import Haystack, noise_haystack
from tost_lm.evaluation.retrieval.puzzle import Puzzle, PuzzleTask
from tost_lm.evaluation.retrieval.words import listed, numbers, variables

HOPS, LETTERS, DIGITS = 4, 5, 5


class VariableTracking(PuzzleTask):
    chance = (HOPS + 1) / 26**LETTERS

    def __init__(self, name: str, seed: int, tokenizer: Tokenizer):
        super().__init__(name, seed, tokenizer)
        self.room = sum(map(len, listed(["X" * LETTERS] * (HOPS + 1))))

    def puzzle(self, draws: np.random.Generator) -> Puzzle:
        names = list(islice(variables(draws, LETTERS), HOPS + 1))
        value = next(numbers(draws, DIGITS))
        first = (" VAR", f" {names[0]}", " =", f" {value}", "\n")
        return Puzzle(
            intro="The text below sets variables. Keep track of which of them have the same value.\n",
            needles=(first, *((" VAR", f" {b}", " = VAR", f" {a}", "\n") for a, b in pairwise(names))),
            asked=(True,) * len(names),
            question=(
                "\nQuestion: Which variables have the value", f" {value}", "?",
                "\nAnswer: The variables with the value", f" {value}", " are",
            ),
            references=tuple(names),
            answer=tuple(listed(names)),
            others=iter(()),
        )  # fmt: skip

    def haystack(self, puzzle: Puzzle, length: int, tokens: int, draws: np.random.Generator) -> Haystack:
        return noise_haystack(self.tokenizer)
