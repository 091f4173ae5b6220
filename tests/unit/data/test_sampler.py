"""Sampling is a pure function of the seed and the step, and an epoch visits every window once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tost_lm.data.sampler import _epoch_order, batch_windows


def samples(seed: int, batch: int, windows: int, count: int) -> np.ndarray:
    steps = -(-count // batch)
    return np.concatenate([batch_windows(seed, step, batch, windows) for step in range(steps)])[:count]


@given(st.integers(0, 2**63), st.integers(1, 40), st.integers(1, 60))
def test_each_epoch_visits_each_window_once(seed, batch, windows):
    epochs = samples(seed, batch, windows, 3 * windows).reshape(3, windows)
    assert (np.sort(epochs, axis=1) == np.arange(windows)).all()


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 60))
def test_the_order_does_not_depend_on_the_batch_size(one, other, windows):
    assert np.array_equal(samples(7, one, windows, 2 * windows), samples(7, other, windows, 2 * windows))


def test_a_step_depends_on_no_earlier_call():
    in_order = [batch_windows(3, step, 8, 50) for step in range(40)]
    _epoch_order.cache_clear()
    for step in reversed(range(40)):
        assert np.array_equal(batch_windows(3, step, 8, 50), in_order[step])
    assert in_order[0].dtype == np.int64
    assert in_order[0].shape == (8,)


def test_seeds_and_epochs_have_orders_of_their_own():
    orders = {tuple(samples(seed, 10, 100, 200)[start : start + 100]) for seed in range(5) for start in (0, 100)}
    assert len(orders) == 10


def test_the_order_is_pinned():
    # Runs are resumed with other versions of NumPy, so these numbers may never change.
    assert batch_windows(1234, 0, 10, 10).tolist() == [5, 6, 3, 9, 7, 4, 1, 2, 8, 0]
    assert batch_windows(1234, 3, 3, 10).tolist() == [0, 9, 2]
