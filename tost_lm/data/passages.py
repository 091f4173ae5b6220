"""Recall passages: lines of a text with secrets that stand in them several times.

    … BEGINNING KEY WORD. … BEGINNING KEY WORD. …

The first mention of a secret cannot be predicted, and each later one can, from any distance. So a model that trains on
passages learns to store and to find associations, in far fewer tokens than from text alone. The beginning is that of
all secrets of a passage. It is drawn from the words of the text, as their keys and words, so that a model learns to
match any words, not those of a few sentences. Names and words of task `needle@keys` (`tost_lm/tasks/needle.py`) are in
no passage.
"""

import re
from collections.abc import Iterator, Sequence

import numpy as np

from tost_lm.data.settings import PassagesConfig
from tost_lm.errors import DataError

TEST_NAMES = (
    "Oslo", "Lima", "Cairo", "Delhi", "Dublin", "Kabul", "Lagos", "Prague", "Vienna", "Athens", "Lisbon", "Madrid",
    "Zurich", "Denver", "Perth", "Ghent",
)  # fmt: skip
TEST_WORDS = (
    "apple", "river", "horse", "stone", "music", "glass", "honey", "butter", "pencil", "basket", "ladder", "rope",
    "coat", "spoon", "shoe", "wheel",
)  # fmt: skip
"""Names and words of task `needle@keys`; lines with one of them are left out."""
WORD = re.compile(r"[^\W\d_]{3,10}")
LINE_CHARACTERS = 100
"""Longer lines are cut."""
LINES, BEGINNING, SECRETS, MENTIONS = (1, 4), (1, 4), (2, 6), (3, 6)
"""Fewest and most lines of text, words of the beginning, secrets of a passage, and mentions of each."""


def passages(texts: Sequence[Sequence[str]], config: PassagesConfig) -> Iterator[str]:
    """Draw `config.count` passages, a pure function of the arguments.

    Args:
        texts: the lines of each text.

    Raises:
        DataError: no text has enough words.
    """
    held_out = {word.lower() for word in (*TEST_NAMES, *TEST_WORDS)}
    usable = []
    for text in texts:
        lines = [line for line in text if held_out.isdisjoint(WORD.findall(line.lower()))]
        words = sorted({word for line in lines for word in WORD.findall(line)})
        if len(words) >= SECRETS[1]:
            usable.append((lines, words))
    if not usable:
        raise DataError(f"passages.text {config.text}: no document has {SECRETS[1]} words; give other documents")

    for number in range(config.count):
        draws = np.random.default_rng((config.seed, number))
        (text, words), wanted = usable[int(draws.integers(len(usable)))], _between(LINES, draws)
        start = int(draws.integers(max(1, len(text) - wanted)))
        lines = [line[:LINE_CHARACTERS] for line in text[start : start + wanted]]
        placed = [((n + 0.5) / len(lines), line) for n, line in enumerate(lines)]
        beginning = " ".join(draws.choice(words, _between(BEGINNING, draws)))
        for key in draws.permutation(words)[: _between(SECRETS, draws)]:
            secret = f"{beginning} {key} {draws.choice(words)}."
            placed += [(float(place), secret) for place in draws.random(_between(MENTIONS, draws))]
        yield "\n".join(line for _, line in sorted(placed))


def _between(bounds: tuple[int, int], draws: np.random.Generator) -> int:
    return int(draws.integers(bounds[0], bounds[1] + 1))
