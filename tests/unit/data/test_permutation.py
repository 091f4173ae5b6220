"""Permutations without a table: pinned bijections that look random."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tost_lm.data.samples import Order, permuted


@given(st.integers(1, 5000), st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4))
def test_permutations_are_bijections(n: int, key: list[int]):
    assert (np.sort(permuted(np.arange(n), n, *key)) == np.arange(n)).all()


def test_elements_are_computed_independently():
    whole = permuted(np.arange(1000), 1000, 1, 2)
    chosen = np.array([999, 3, 3, 500])
    assert np.array_equal(permuted(chosen, 1000, 1, 2), whole[chosen])
    far = permuted(np.array([10**12 - 1, 0, 7]), 10**12, 1, 2)
    assert len(set(far.tolist())) == 3
    assert ((far >= 0) & (far < 10**12)).all()


@pytest.mark.parametrize("n", [2**16, 2**16 + 1, 100_000])
def test_an_order_looks_random(n: int):
    index, value = np.arange(n), permuted(np.arange(n), n, Order.WINDOWS, 0, 0, 5)
    assert abs(np.corrcoef(index, value)[0, 1]) < 0.02
    assert abs(np.corrcoef(value[:-1], value[1:])[0, 1]) < 0.02
    assert np.abs(index - value).mean() / n == pytest.approx(1 / 3, rel=0.02)
    # Differences of neighbours repeat as rarely as in a NumPy permutation, and the lowest bits mix.
    drawn = np.random.default_rng(0).permutation(n)
    assert len(np.unique(np.diff(value))) == pytest.approx(len(np.unique(np.diff(drawn))), rel=0.02)
    odd = value % 2
    assert (odd[:-1] == odd[1:]).mean() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("n", [3, 4])
def test_all_orders_of_few_elements_are_equally_likely(n: int):
    seen = Counter(tuple(permuted(np.arange(n), n, 0, seed).tolist()) for seed in range(2400))
    expected = 2400 / (6 if n == 3 else 24)
    assert len(seen) == (6 if n == 3 else 24)
    assert sum((count - expected) ** 2 / expected for count in seen.values()) < (25 if n == 3 else 60)


def test_every_key_has_a_different_order():
    keys = [(order, corpus, epoch, seed) for order in Order for corpus in (0, 1) for epoch in (0, 1) for seed in (0, 1)]
    assert len({tuple(permuted(np.arange(50), 50, *key).tolist()) for key in keys}) == len(keys)


def test_orders_are_pinned():
    # Later versions, also of NumPy, must resume runs of earlier ones, so these numbers must not change.
    assert permuted(np.arange(10), 10, 0, 0, 1234).tolist() == [3, 2, 0, 1, 7, 6, 5, 9, 4, 8]
    far = permuted(np.array([0, 1, 999_999_999]), 10**9, 3, 1, 4, 1, 2**63 - 1)
    assert far.tolist() == [722731806, 341553257, 581113387]
