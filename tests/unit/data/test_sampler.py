"""Concatenated samples: every token is a label once in an epoch, in an order that depends on seed and epoch alone."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tost_lm.data.sampler import ConcatenatedSamples, Spans, runs


def labels_of(spans: Spans) -> list[int]:
    """The places of the labels, −1 for filling."""
    stretches = zip(spans.start.tolist(), spans.length.tolist(), strict=True)
    return [
        place
        for start, length in stretches
        for place in (range(start, start + length) if start >= 0 else [-1] * length)
    ]


def of_sample(samples: ConcatenatedSamples, number: int) -> list[int]:
    return labels_of(samples.spans(np.array([number])))


def test_a_sample_is_cut_out_of_the_tokens_and_the_last_one_is_filled():
    samples = ConcatenatedSamples(10, 4, 0, 0)
    found = {tuple(of_sample(samples, number)) for number in range(len(samples))}
    assert found == {(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, -1, -1)}
    spans = samples.spans(np.arange(3))
    assert {int(start): bool(fresh) for start, _, fresh in zip(*spans, strict=True)} == {
        0: True, 4: False, 8: False, -1: True,
    }  # fmt: skip


@given(st.integers(0, 2**63 - 1), st.integers(1, 200), st.integers(1, 20))
def test_every_token_is_a_label_once_in_each_epoch(seed: int, tokens: int, sequence_tokens: int):
    samples = ConcatenatedSamples(tokens, sequence_tokens, 0, seed)
    assert len(samples) == -(-tokens // sequence_tokens)
    for epoch in range(3):
        labels = labels_of(samples.spans(np.arange(epoch * len(samples), (epoch + 1) * len(samples))))
        assert len(labels) == len(samples) * sequence_tokens
        assert sorted(place for place in labels if place >= 0) == list(range(tokens))


def test_a_sample_depends_on_no_other_that_is_asked_for():
    samples = ConcatenatedSamples(1003, 10, 0, 7)
    whole = samples.spans(np.arange(300))
    parts = [samples.spans(x) for x in np.array_split(np.arange(300), 7)]
    for x, xs in zip(whole, zip(*parts, strict=True), strict=True):
        assert np.array_equal(x, np.concatenate(xs))


def test_seeds_corpora_and_epochs_have_orders_of_their_own():
    orders = {
        tuple(ConcatenatedSamples(100, 1, corpus, seed).spans(np.arange(100 * epoch, 100 * epoch + 100)).start.tolist())
        for corpus in range(2) for seed in range(3) for epoch in range(2)
    }  # fmt: skip
    assert len(orders) == 12


def test_runs_are_stretches_of_equal_neighbours():
    assert [(x, part.start, part.stop) for x, part in runs(np.array([3, 3, 0, 3]))] == [(3, 0, 2), (0, 2, 3), (3, 3, 4)]
