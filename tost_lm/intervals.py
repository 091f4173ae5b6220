"""95 % intervals: of scores, and of differences between two models on the same examples."""

from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple

Z = NormalDist().inv_cdf(0.975)


def wilson(score: float, count: float) -> tuple[float, float]:
    """Wilson's interval of the mean of `count` independent scores from 0 to 1.

    It has a width also at 0 and 1, where a standard error is 0. It is exact for shares of right answers, and wider than
    needed for scores with values between 0 and 1.
    """
    middle = (score + Z * Z / (2 * count)) / (1 + Z * Z / count)
    half = Z * (score * (1 - score) / count + (Z / (2 * count)) ** 2) ** 0.5 / (1 + Z * Z / count)
    return max(0.0, middle - half), min(1.0, middle + half)


class Difference(NamedTuple):
    """A mean difference over pairs of examples, with its interval."""

    mean: float
    low: float
    high: float
    pairs: int


def paired(own: Sequence[float], other: Sequence[float], *, are_scores: bool) -> Difference | None:
    """The mean of own − other over examples; None for fewer than two.

    Args:
        are_scores: the values are scores from 0 to 1. The interval then has one more pair for each model in which it
            alone is right (Bonett and Price 2012), so that it has a width also if all pairs agree.
    """
    differences = [one - two for one, two in zip(own, other, strict=True)]
    if len(differences) < 2:
        return None
    counted = [*differences, 1.0, -1.0] if are_scores else differences
    half = Z * stdev(counted) / len(counted) ** 0.5
    middle = fmean(counted)
    return Difference(fmean(differences), middle - half, middle + half, len(differences))
