"""Concatenated samples: each token is a label once per epoch, in an order that depends on seed and epoch alone."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tost_lm.data.samples import ConcatenatedSamples, Segments


def labels_of(segments: Segments) -> list[int]:
    """The indices of the labels, −1 for padding."""
    return [
        index
        for start, length in zip(segments.start.tolist(), segments.length.tolist(), strict=True)
        for index in (range(start, start + length) if start >= 0 else [-1] * length)
    ]


def of_sample(samples: ConcatenatedSamples, number: int) -> list[int]:
    return labels_of(samples.segments(np.array([number])))


def test_samples_are_windows_and_the_last_one_is_padded():
    samples = ConcatenatedSamples([np.array([10])], 4, 0, 0)
    found = {tuple(of_sample(samples, number)) for number in range(len(samples))}
    assert found == {(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, -1, -1)}
    segments = samples.segments(np.arange(3))
    assert {int(start): bool(fresh) for start, _, fresh in zip(*segments, strict=True)} == {
        0: True, 4: False, 8: False, -1: True,
    }  # fmt: skip


@given(st.integers(0, 2**63 - 1), st.integers(1, 200), st.integers(1, 20))
def test_each_token_is_a_label_once_per_epoch(seed: int, tokens: int, seq_len: int):
    samples = ConcatenatedSamples([np.array([tokens])], seq_len, 0, seed)
    assert len(samples) == -(-tokens // seq_len)
    for epoch in range(3):
        labels = labels_of(samples.segments(np.arange(epoch * len(samples), (epoch + 1) * len(samples))))
        assert len(labels) == len(samples) * seq_len
        assert sorted(label for label in labels if label >= 0) == list(range(tokens))


def test_a_sample_does_not_depend_on_other_samples():
    samples = ConcatenatedSamples([np.array([1003])], 10, 0, 7)
    whole = samples.segments(np.arange(300))
    found = [samples.segments(x) for x in np.array_split(np.arange(300), 7)]
    for x, xs in zip(whole, zip(*found, strict=True), strict=True):
        assert np.array_equal(x, np.concatenate(xs))


def test_seeds_corpora_and_epochs_have_different_orders():
    lengths, number_N = [np.array([100])], np.arange(100)
    orders = {
        tuple(ConcatenatedSamples(lengths, 1, corpus, seed).segments(number_N + 100 * epoch).start.tolist())
        for corpus in range(2) for seed in range(3) for epoch in range(2)
    }  # fmt: skip
    assert len(orders) == 12
