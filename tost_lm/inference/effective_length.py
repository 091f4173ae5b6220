"""Effective length: the longest tested length at which the mean score over retrieval tasks is at least a threshold."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tost_lm.intervals import wilson

ACCURACIES = {"choice_accuracy": "choice", "found_share": "found", "token_accuracy": "tokens"}
"""Scores by precedence, and their names in tables: a task's score is the first that it has."""
RULER_THRESHOLD = 0.856
"""Of RULER (arXiv 2404.06654): the score of Llama-2-7B at 4,096 tokens."""


def accuracy_of(cell: Mapping[str, Any]) -> str:
    """The key of the score that stands for a task in its cells."""
    return next(key for key in ACCURACIES if key in cell)


class EffectiveLength(NamedTuple):
    """The effective length of one checkpoint. Of the lengths, 0 is below all that were tested."""

    tasks: tuple[str, ...]
    threshold: float
    tested: tuple[int, ...]
    """The lengths that all tasks have."""
    texts: int
    """At each length, of all tasks together; the fewest."""
    tokens: int
    low: int
    """The longest length whose interval lies at or above the threshold."""
    high: int
    """The longest length whose interval has a part at or above the threshold."""

    @property
    def shown(self) -> str:
        """The length with its interval."""
        tokens, low, high = (f"{n:,}" if n else f"< {self.tested[0]:,}" for n in (self.tokens, self.low, self.high))
        return f"{tokens} tokens ({low} to {high})"

    @property
    def about(self) -> str:
        """What it was measured by."""
        tested = ", ".join(f"{n:,}" for n in self.tested)
        return (
            f"mean score of {', '.join(self.tasks)} at least {self.threshold:.1%}, tested at {tested}; in parentheses "
            f"the 95 % interval over {self.texts:,} texts of each length"
        )


def effective_lengths(found: Mapping[str, Mapping[str, Any]]) -> Iterator[EffectiveLength]:
    """One for each threshold, checkpoint and kind of score in results of tasks; others have no threshold."""
    groups: dict[tuple[Any, ...], dict[str, Sequence[Mapping[str, Any]]]] = {}
    for name, results in found.items():
        if "threshold" in results:
            checkpoint = results.get("identity", {}).get("checkpoint_sha256")
            key = results["threshold"], checkpoint, accuracy_of(results["cells"][0])
            groups.setdefault(key, {})[name] = results["cells"]
    for (threshold, *_), tasks in groups.items():
        tested = sorted(set.intersection(*({cell["length"] for cell in cells} for cells in tasks.values())))
        if tested:
            yield _effective_length(tasks, threshold, tested)


def _effective_length(
    tasks: Mapping[str, Sequence[Mapping[str, Any]]], threshold: float, tested: Sequence[int]
) -> EffectiveLength:
    passed, texts = {0: (True, True, True)}, []
    for length in tested:
        scores, counts = [], []
        for cells in tasks.values():
            (cell,) = (cell for cell in cells if cell["length"] == length)
            counts.append(cell["samples"])
            scores.append(cell[accuracy_of(cell)])
        mean = sum(scores) / len(scores)
        # Tasks with fewer texts add more to the variance of the mean.
        low, high = wilson(mean, len(counts) ** 2 / sum(1 / count for count in counts))
        passed[length] = mean >= threshold, low >= threshold, high >= threshold
        texts.append(sum(counts))
    longest = [max(length for length, which in passed.items() if which[i]) for i in range(3)]
    return EffectiveLength(tuple(tasks), threshold, tuple(tested), min(texts), *longest)
