"""Recall passages: lines of a text with secrets that stand in them several times.

    … The secret word of NAME is WORD. … The secret word of NAME is WORD. …

The first mention of a secret cannot be predicted, and each later one can, from any distance. So a model that trains on
passages learns to store and to find associations, in far fewer tokens than from text alone. Task `needle@words`
(`tost_lm/tasks/needle.py`) asks with the same sentence.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from tost_lm.data.settings import PassagesConfig

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Iris", "Jack")
WORDS = ("apple", "river", "table", "green", "music", "stone", "horse", "paper", "night", "glass")
LINE_CHARACTERS = 100
"""Longer lines are cut."""
SECRETS, MENTIONS = (2, 8), (3, 6)
"""Fewest and most secrets of a passage, and mentions of each."""


def secret_line(name: str) -> str:
    """The beginning of the sentence, which the word follows."""
    return f"The secret word of {name} is"


def passages(texts: Sequence[Sequence[str]], config: PassagesConfig) -> Iterator[str]:
    """Draw `config.count` passages, a pure function of the arguments.

    Args:
        texts: the lines of each text; each has at least one.
    """
    fewest, most = config.lines
    for number in range(config.count):
        draws = np.random.default_rng((config.seed, number))
        text, wanted = texts[int(draws.integers(len(texts)))], int(draws.integers(fewest, most + 1))
        start = int(draws.integers(max(1, len(text) - wanted)))
        lines = [line[:LINE_CHARACTERS] for line in text[start : start + wanted]]
        placed = [((n + 0.5) / len(lines), line) for n, line in enumerate(lines)]
        secrets = int(draws.integers(SECRETS[0], SECRETS[1] + 1))
        for name in draws.permutation(NAMES)[:secrets]:
            sentence = f"{secret_line(name)} {WORDS[int(draws.integers(len(WORDS)))]}."
            mentions = int(draws.integers(MENTIONS[0], MENTIONS[1] + 1))
            placed += [(float(place), sentence) for place in draws.random(mentions)]
        yield "\n".join(line for _, line in sorted(placed))
