"""Tasks that ask for the most frequent words of a list, so that the answer needs the whole text."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import chain, islice, repeat

import numpy as np

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.eval.retrieval.haystacks import LONGEST_KEY, PAIRS, listed, noise_haystack, variables, word_keys
from tost_lm.eval.retrieval.tasks import Example, Task

Counts = list[tuple[str, int]]
"""Distinct words, and how often each occurs."""


class WordList(Task):
    """Base class. Every occurrence of every word has a drawn place. Sentences before the list fill the length.

        [EOT] Remember which words occur most often in the list at the end of this text.
        sentences … The list: WORD WORD WORD …
        Question: Which N words occur most often in the list?
        Answer: The words are → WORD, WORD … and WORD

    The answer has the most frequent word first, and of equally frequent ones the one that occurs first. In the control,
    the words of the answer do not occur.
    """

    question: str
    longest: int
    """Characters of the longest word of an answer."""
    answers: int
    """Words in an answer."""

    def __init__(self, name: str, seed: int, tokenizer: Tokenizer):
        self.name, self.seed, self.tokenizer = name, seed, tokenizer
        self.room = sum(map(len, listed(["x" * self.longest] * self.answers)))
        intro = "Remember which words occur most often in the list at the end of this text.\n"
        self._before, self._list, self._after = map(
            tokenizer.encode_array, (intro, "The list:", f"\nQuestion: {self.question}\nAnswer: The words are")
        )

    @abstractmethod
    def words(self, draws: np.random.Generator) -> Iterator[str]:
        """Distinct words, without end."""

    @abstractmethod
    def counts(self, words: Iterator[str], tokens: int) -> tuple[Counts, Counts]:
        """Counts of the answer's words, and of the others. All occurrences together have at most `tokens` tokens."""

    def example(self, length: int, depth: float | None, sample: int) -> tuple[Example, Example]:
        tokens = length - self._frame
        wanted, others = self.counts(self.words(self.draws(sample)), tokens)
        listing = self._listing(wanted + others, sample, length)
        first_place = {word: listing.index(word) for word, _ in wanted}
        answer = [word for word, _ in sorted(wanted, key=lambda one: (-one[1], first_place[one[0]]))]

        def make(listing: Sequence[str]) -> Example:
            ids = {word: self.tokenizer.encode(f" {word}") for word in set(listing)}
            words = np.fromiter(chain.from_iterable(ids[word] for word in listing), np.int64)
            noise = noise_haystack(self.tokenizer)(tokens - len(words))
            arrays = [[self.tokenizer.eot], self._before, noise, self._list, words, self._after]
            return Example(
                prompt=np.concatenate(arrays).astype(np.int64),
                question="Answer: The words are",
                references=tuple(answer),
                options=(tuple(chain.from_iterable(map(self.tokenizer.encode, listed(answer)))),),
                right=0,
            )

        return make(listing), make(self._listing(others, sample, length))

    def _listing(self, counts: Counts, sample: int, length: int) -> list[str]:
        """Every occurrence, in a drawn order."""
        places = np.repeat(np.arange(len(counts)), [times for _, times in counts])
        return [counts[place][0] for place in self.draws(sample, length).permutation(places).tolist()]

    @property
    def _frame(self) -> int:
        """Tokens besides the list and the sentences before it."""
        return 1 + len(self._before) + len(self._list) + len(self._after) + self.room

    def _tokens(self, words: Sequence[str]) -> np.ndarray:
        """Tokens of each word in the list."""
        return np.array([len(self.tokenizer.encode(f" {word}")) for word in words])


COMMON_TIMES, OTHER_TIMES = 30, 3


class CommonWords(WordList):
    """Common words, protocol `cwe@own-words`: RULER's structure (arXiv 2404.06654) with words of our own.

    Ten words occur 30 times each, and as many others as fit 3 times each. So a longer list has more other words.
    """

    question = "Which ten words occur most often in the list?"
    answers, longest, chance = 10, LONGEST_KEY, 10 / PAIRS

    def needed(self, samples: int) -> int:
        lists = (list(islice(self.words(self.draws(sample)), self.answers)) for sample in range(samples))
        return self._frame + COMMON_TIMES * max(int(self._tokens(words).sum()) for words in lists)

    def words(self, draws: np.random.Generator) -> Iterator[str]:
        return word_keys(draws)

    def counts(self, words: Iterator[str], tokens: int) -> tuple[Counts, Counts]:
        found: Counts = []
        for word, times in zip(words, chain(repeat(COMMON_TIMES, self.answers), repeat(OTHER_TIMES)), strict=False):
            tokens -= times * int(self._tokens([word])[0])
            if tokens < 0:
                break
            found.append((word, times))
        return found[: self.answers], found[self.answers :]


NOISE_WORD, LETTERS = "...", 6
SHORTEST_LIST = 100
"""Words of the shortest list. From here on, each of the first five occurs more often than the next."""


class FrequentWords(WordList):
    """Frequent words, protocol `fwe@own-words`: RULER's structure (arXiv 2404.06654).

    Words are six drawn letters. The k-th occurs n / (k² · ζ(2)) times in a list of about n words, as in RULER, with
    ζ(2) = π² / 6. The first is `...`, and the answer names the next three.
    """

    question = "Which three words, besides the dots, occur most often in the list?"
    answers, longest, chance = 3, LETTERS, 3 / 26**LETTERS

    def needed(self, samples: int) -> int:
        return self._frame + max(self._cost(self._first_words(sample), SHORTEST_LIST) for sample in range(samples))

    def words(self, draws: np.random.Generator) -> Iterator[str]:
        return chain([NOISE_WORD], variables(draws, LETTERS))

    def counts(self, words: Iterator[str], tokens: int) -> tuple[Counts, Counts]:
        drawn = list(islice(words, len(_zipf(tokens))))
        low, high = SHORTEST_LIST, tokens + 1  # bisection: a list of `low` words fits, one of `high` does not
        costs = self._tokens(drawn)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._cost(costs, middle) <= tokens else (low, middle)
        counts = list(zip(drawn, _zipf(low), strict=False))
        return counts[1 : 1 + self.answers], [counts[0], *counts[1 + self.answers :]]

    def _first_words(self, sample: int) -> np.ndarray:
        return self._tokens(list(islice(self.words(self.draws(sample)), len(_zipf(SHORTEST_LIST)))))

    @staticmethod
    def _cost(tokens: np.ndarray, words: int) -> int:
        counts = _zipf(words)
        return int(np.dot(tokens[: len(counts)], counts))


def _zipf(words: int) -> list[int]:
    """How often the k-th word of a list of about `words` words occurs; all that occur at all."""
    ranks = np.arange(1, int((words * 6 / np.pi**2) ** 0.5) + 1)
    return (words * 6 / np.pi**2 / ranks**2).astype(int).tolist()
