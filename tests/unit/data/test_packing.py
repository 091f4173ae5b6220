"""Packing whole documents: every stored token a label once, samples full, next to nothing cut or filled, and lazily."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tost_lm.data import packing
from tost_lm.data.packing import Blocks, PackedSamples, group_tokens, pack
from tost_lm.data.sampler import Spans

Lengths = st.lists(st.integers(1, 60), min_size=1, max_size=60)


def places(spans: Spans) -> np.ndarray:
    """Of all labels, filling apart."""
    real = spans.start >= 0
    return np.concatenate([np.arange(s, s + n) for s, n in zip(spans.start[real], spans.length[real], strict=True)])


def check_spans(spans: Spans, lengths: np.ndarray, sequence_tokens: int) -> None:
    """No span leaves its document or its sample, and just those that begin one are fresh."""
    starts = np.cumsum(lengths) - lengths
    real = spans.start >= 0
    document = np.searchsorted(starts, spans.start[real], "right") - 1
    assert (spans.start[real] + spans.length[real] <= (starts + lengths)[document]).all()
    assert np.array_equal(spans.fresh[real], spans.start[real] == starts[document])
    ends = np.cumsum(spans.length)
    assert np.array_equal((ends - 1) // sequence_tokens, (ends - spans.length) // sequence_tokens)
    assert (spans.length > 0).all()


@given(Lengths, st.integers(1, 40))
def test_a_group_fills_its_samples_with_every_token_once(lengths: list[int], sequence_tokens: int):
    length_D = np.array(lengths)
    packed = pack(np.cumsum(length_D) - length_D, length_D, sequence_tokens)
    samples = -(-sum(lengths) // sequence_tokens)
    assert len(packed.first_span) == samples + 1
    assert packed.spans.length.sum() == samples * sequence_tokens
    assert sorted(places(packed.spans)) == list(range(sum(lengths)))
    check_spans(packed.spans, length_D, sequence_tokens)
    filling = np.flatnonzero(packed.spans.start < 0)
    assert filling.tolist() in ([], [len(packed.spans.start) - 1])
    assert np.array_equal(
        np.cumsum(packed.spans.length)[packed.first_span[1:] - 1] % sequence_tokens, np.zeros(samples)
    )
    chosen = np.array([samples - 1, 0])
    again = packed.spans_of(chosen)
    assert np.array_equal(places(again), np.concatenate([places(packed.spans_of(chosen[i : i + 1])) for i in (0, 1)]))


@pytest.mark.parametrize(
    ("lengths", "parts"),
    [
        ([7, 5, 5, 3], [[(0, 7), (17, 3)], [(7, 5), (12, 5)]]),
        ([25, 5], [[(0, 10)], [(10, 10)], [(20, 5), (25, 5)]]),
        ([6, 6, 6, 2], [[(0, 6), (12, 4)], [(6, 6), (18, 2), (16, 2)]]),  # six at 12 that no sample has room for
        ([4, 3], [[(0, 4), (4, 3), (-1, 3)]]),
    ],
)
def test_documents_stay_whole_where_they_can(lengths: list[int], parts: list[list[tuple[int, int]]]):
    length_D = np.array(lengths)
    packed = pack(np.cumsum(length_D) - length_D, length_D, 10)
    found = [
        [(int(start), int(length)) for start, length, _ in zip(*packed.spans_of(np.array([i])), strict=True)]
        for i in range(len(packed.first_span) - 1)
    ]
    assert sorted(map(sorted, found)) == sorted(map(sorted, parts))


def test_hardly_anything_is_cut_or_filled():
    """Log-normal lengths, 600 tokens in the mean; what concatenating them cuts is 35 % and 7 %."""
    draws = np.random.default_rng(0).lognormal(np.log(600) - 0.5, 1.0, 28_000)
    lengths = np.maximum(draws, 2).astype(np.int32)
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    for sequence_tokens, cut_at_most in ((1024, 0.005), (8192, 0.005)):
        samples = PackedSamples([lengths], sequence_tokens, 0, 0)
        spans = samples.spans(np.arange(len(samples)))
        assert len(samples) * sequence_tokens < 1.001 * lengths.sum()
        pieces = np.bincount(np.searchsorted(starts, spans.start[spans.start >= 0], "right") - 1)
        assert (pieces > -(-lengths // sequence_tokens)).mean() < cut_at_most
        assert (starts // sequence_tokens != (starts + lengths - 1) // sequence_tokens).mean() > 10 * cut_at_most


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packing, "BLOCK_TOKENS", 16)
    monkeypatch.setattr(packing, "GROUP_TOKENS", 100)
    monkeypatch.setattr(packing, "GROUP_SAMPLES", 4)


LENGTHS = np.random.default_rng(3).integers(1, 40, 150).astype(np.int32)


@pytest.mark.usefixtures("small_groups")
def test_every_token_is_a_label_once_in_each_epoch_and_orders_differ():
    samples = PackedSamples(np.array_split(LENGTHS, [3, 70]), 20, 0, 5)
    assert len(samples._samples) > 10
    orders = set()
    for epoch in range(3):
        spans = samples.spans(np.arange(epoch * len(samples), (epoch + 1) * len(samples)))
        check_spans(spans, LENGTHS, 20)
        assert sorted(places(spans)) == list(range(LENGTHS.sum()))
        assert spans.length.sum() == 20 * len(samples)
        orders.add(tuple(spans.start.tolist()))
    assert len(orders) == 3
    assert (
        len({tuple(PackedSamples([LENGTHS], 20, 0, seed).spans(np.arange(9)).start.tolist()) for seed in range(5)}) == 5
    )


@pytest.mark.usefixtures("small_groups")
def test_shards_and_what_else_is_asked_for_change_no_sample():
    samples = PackedSamples(np.array_split(LENGTHS, [3, 70]), 20, 0, 5)
    whole = samples.spans(np.arange(400))
    other = PackedSamples([LENGTHS], 20, 0, 5)
    parts = [other.spans(part) for part in np.array_split(np.arange(400), 23)]
    for x, xs in zip(whole, zip(*parts, strict=True), strict=True):
        assert np.array_equal(x, np.concatenate(xs))


@pytest.mark.usefixtures("small_groups")
def test_groups_are_packed_when_a_sample_of_theirs_is_asked_for():
    samples = PackedSamples([LENGTHS], 20, 0, 5)
    assert samples._packing_of_group.cache_info().misses == 0
    samples.spans(np.array([len(samples) // 2]))
    assert samples._packing_of_group.cache_info().misses == 1


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("lengths", [[500, 3, 3, 700], [1], [16] * 9, [15, 1, 33, 16, 2]])
def test_blocks_hold_the_documents_that_begin_in_them(lengths: list[int]):
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    expected = [list(group) for _, group in itertools.groupby(range(len(lengths)), lambda i: starts[i] // 16)]
    for cut in range(1, len(lengths) + 1):
        blocks = Blocks.of([np.array(part, dtype=np.int32) for part in (lengths[:cut], lengths[cut:]) if part])
        assert blocks.first_document.tolist() == [*(group[0] for group in expected), len(lengths)]
        assert blocks.first_token.tolist() == [*(starts[group[0]] for group in expected), sum(lengths)]
    samples = PackedSamples([np.array(lengths)], 5, 0, 0)
    assert sorted(places(samples.spans(np.arange(len(samples))))) == list(range(sum(lengths)))


@pytest.mark.parametrize(
    ("sequence_tokens", "expected"),
    [(2, 2**22), (2**12, 2**22), (2**16, 2**26), (2**20, 2**26), (2**22, 2**26), (2**25, 2**29)],
)
def test_a_group_is_large_for_little_filling_and_small_to_be_packed_soon(sequence_tokens: int, expected: int):
    assert group_tokens(sequence_tokens) == expected


def test_groups_of_a_corpus_of_ten_to_the_thirteen_tokens():
    lengths = np.full(6000, 2**31 - 5, dtype=np.int32)  # each longer than a group, so alone in one
    samples = PackedSamples([lengths], 1000, 0, 0)
    assert samples._samples.tolist() == [2_147_484] * 6000


def test_an_order_is_pinned():
    # Runs are resumed with later versions of this package, so these numbers may never change.
    samples = PackedSamples([np.array([5, 9, 3, 12, 1, 7])], 8, 1, 1234)
    assert samples.spans(np.arange(5, 10)).start.tolist() == [25, 14, 13, 0, -1, 17, 30, 29, 5]
