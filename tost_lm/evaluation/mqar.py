"""Multi-query associative recall, protocol `mqar@zoology` (Arora et al. 2023, arXiv 2312.04927).

    k₁ v₁ k₂ v₂ … kₙ vₙ   · · k₂ · · · k₁ · · …        label of each query: the value of its key

An example begins with `pairs` pairs of a key and its value. Each key appears once more as a query, at the first token
of a slot of two, where the model must predict the value. Keys are distinct ids of the lower half of the vocabulary,
values independent ids of the upper half. Slots g = 1, 2, … are drawn without replacement with weight g^(power − 1), so
most queries are near the pairs and a few are far away. The assignment of keys to slots is uniform, so the position of a
query does not depend on its value. All other tokens are noise: any ids except the keys of the example.
"""

from typing import NamedTuple

import numpy as np

from tost_lm.evaluation.recall_config import MqarConfig
from tost_lm.ops.cross_entropy import IGNORED_LABEL


class Examples(NamedTuple):
    """`tokens` and `labels`, int64 [examples, T]; the label of a query is its value, elsewhere −100."""

    tokens: np.ndarray
    labels: np.ndarray


def draw_examples(config: MqarConfig, count: int, *stream: int) -> Examples:
    """`count` examples, a pure function of the settings, the count and the numbers of the random stream."""
    draws = np.random.default_rng((config.seed, *stream))
    pairs, half = config.pairs, config.vocab_size // 2
    keys = _distinct(draws, count, pairs, half)
    values = draws.integers(half, config.vocab_size, (count, pairs))
    queries = 2 * (pairs + _slots(draws, count, config))
    tokens = _integers_without(draws, (count, config.seq_len), config.vocab_size, np.sort(keys, axis=1))
    tokens[:, 0 : 2 * pairs : 2] = keys
    tokens[:, 1 : 2 * pairs : 2] = values
    np.put_along_axis(tokens, queries, keys, axis=1)
    labels = np.full_like(tokens, IGNORED_LABEL)
    np.put_along_axis(labels, queries, values, axis=1)
    return Examples(tokens, labels)


def slot_weights(config: MqarConfig) -> np.ndarray:
    """Probability of each slot in the first draw, float64 [slots]."""
    weights = np.arange(1, config.slots + 1) ** (config.power - 1)
    return weights / weights.sum()


def _slots(draws: np.random.Generator, count: int, config: MqarConfig) -> np.ndarray:
    """The slot of each key's query, [count, pairs]."""
    # The largest log-weights plus Gumbel noise are distributed as successive draws without replacement.
    noisy = np.log(slot_weights(config)) + draws.gumbel(size=(count, config.slots))
    return draws.permuted(np.argsort(-noisy, axis=1)[:, : config.pairs], axis=1)


def _distinct(draws: np.random.Generator, count: int, size: int, below: int) -> np.ndarray:
    """Rows of `size` distinct integers below `below`, uniformly distributed, [count, size]."""
    rows = np.empty((count, size), dtype=np.int64)
    for i in range(size):
        rows[:, i] = _integers_without(draws, (count, 1), below, np.sort(rows[:, :i], axis=1))[:, 0]
    return rows


def _integers_without(draws: np.random.Generator, shape: tuple[int, int], below: int, taken: np.ndarray) -> np.ndarray:
    """Integers below `below` that are not in their row of `taken`, whose rows are distinct and ascending."""
    drawn = draws.integers(below - taken.shape[1], size=shape)
    for column in taken.T:
        drawn += drawn >= column[:, None]
    return drawn
