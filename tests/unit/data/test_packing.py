"""Document packing: each stored token is a label once, few documents are cut, and groups are packed on demand."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tost_lm.data import samples
from tost_lm.data.samples import Blocks, PackedSamples, Segments, group_tokens, pack

pytestmark = pytest.mark.quick

Lengths = st.lists(st.integers(1, 60), min_size=1, max_size=60)


def label_indices(segments: Segments) -> np.ndarray:
    """Indices of all labels except padding."""
    real = segments.start >= 0
    ranges = zip(segments.start[real], segments.length[real], strict=True)
    return np.concatenate([np.arange(start, start + length) for start, length in ranges])


def check_segments(segments: Segments, lengths: np.ndarray, seq_len: int) -> None:
    """Segments stay in their document and sample, and exactly those that begin a document are fresh."""
    starts = np.cumsum(lengths) - lengths
    real = segments.start >= 0
    document = np.searchsorted(starts, segments.start[real], "right") - 1
    assert (segments.start[real] + segments.length[real] <= (starts + lengths)[document]).all()
    assert np.array_equal(segments.fresh[real], segments.start[real] == starts[document])
    ends = np.cumsum(segments.length)
    assert np.array_equal((ends - 1) // seq_len, (ends - segments.length) // seq_len)
    assert (segments.length > 0).all()


@given(Lengths, st.integers(1, 40))
def test_a_group_fills_its_samples_with_each_token_once(lengths: list[int], seq_len: int):
    length_D = np.array(lengths)
    packed = pack(np.cumsum(length_D) - length_D, length_D, seq_len)
    samples = -(-sum(lengths) // seq_len)
    assert len(packed.first_segment) == samples + 1
    assert packed.segments.length.sum() == samples * seq_len
    assert sorted(label_indices(packed.segments)) == list(range(sum(lengths)))
    check_segments(packed.segments, length_D, seq_len)
    padding = np.flatnonzero(packed.segments.start < 0)
    assert padding.tolist() in ([], [len(packed.segments.start) - 1])
    assert np.array_equal(np.cumsum(packed.segments.length)[packed.first_segment[1:] - 1] % seq_len, np.zeros(samples))
    chosen = np.array([samples - 1, 0])
    again = packed.segments_of(chosen)
    one_by_one = [label_indices(packed.segments_of(chosen[i : i + 1])) for i in (0, 1)]
    assert np.array_equal(label_indices(again), np.concatenate(one_by_one))


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([7, 5, 5, 3], [[(0, 7), (17, 3)], [(7, 5), (12, 5)]]),
        ([25, 5], [[(0, 10)], [(10, 10)], [(20, 5), (25, 5)]]),
        ([6, 6, 6, 2], [[(0, 6), (12, 4)], [(6, 6), (18, 2), (16, 2)]]),  # the six at 12 fit in no sample
        ([4, 3], [[(0, 4), (4, 3), (-1, 3)]]),
    ],
)
def test_documents_stay_whole_if_they_fit(lengths: list[int], expected: list[list[tuple[int, int]]]):
    length_D = np.array(lengths)
    packed = pack(np.cumsum(length_D) - length_D, length_D, 10)
    found = [
        [(int(start), int(length)) for start, length, _ in zip(*packed.segments_of(np.array([i])), strict=True)]
        for i in range(len(packed.first_segment) - 1)
    ]
    assert sorted(map(sorted, found)) == sorted(map(sorted, expected))


def test_few_documents_are_cut_and_padding_is_small():
    """Log-normal lengths of mean 600. Concatenation cuts 35 % of the documents at T = 1024, 7 % at T = 8192."""
    draws = np.random.default_rng(0).lognormal(np.log(600) - 0.5, 1.0, 28_000)
    lengths = np.maximum(draws, 2).astype(np.int32)
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    for seq_len, cut_at_most in ((1024, 0.005), (8192, 0.005)):
        samples = PackedSamples([lengths], seq_len, 0, 0)
        segments = samples.segments(np.arange(len(samples)))
        assert len(samples) * seq_len < 1.001 * lengths.sum()
        cuts = np.bincount(np.searchsorted(starts, segments.start[segments.start >= 0], "right") - 1)
        assert (cuts > -(-lengths // seq_len)).mean() < cut_at_most
        assert (starts // seq_len != (starts + lengths - 1) // seq_len).mean() > 10 * cut_at_most


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(samples, "BLOCK_TOKENS", 16)
    monkeypatch.setattr(samples, "GROUP_TOKENS", 100)
    monkeypatch.setattr(samples, "GROUP_SAMPLES", 4)


LENGTHS = np.random.default_rng(3).integers(1, 40, 150).astype(np.int32)


@pytest.mark.usefixtures("small_groups")
def test_each_token_is_a_label_once_per_epoch_and_orders_differ():
    samples = PackedSamples(np.array_split(LENGTHS, [3, 70]), 20, 0, 5)
    assert len(samples._samples) > 10
    orders = set()
    for epoch in range(3):
        segments = samples.segments(np.arange(epoch * len(samples), (epoch + 1) * len(samples)))
        check_segments(segments, LENGTHS, 20)
        assert sorted(label_indices(segments)) == list(range(LENGTHS.sum()))
        assert segments.length.sum() == 20 * len(samples)
        orders.add(tuple(segments.start.tolist()))
    assert len(orders) == 3
    by_seed = {tuple(PackedSamples([LENGTHS], 20, 0, seed).segments(np.arange(9)).start.tolist()) for seed in range(5)}
    assert len(by_seed) == 5


@pytest.mark.usefixtures("small_groups")
def test_a_sample_depends_on_neither_shards_nor_other_samples():
    samples = PackedSamples(np.array_split(LENGTHS, [3, 70]), 20, 0, 5)
    whole = samples.segments(np.arange(400))
    other = PackedSamples([LENGTHS], 20, 0, 5)
    found = [other.segments(numbers) for numbers in np.array_split(np.arange(400), 23)]
    for x, xs in zip(whole, zip(*found, strict=True), strict=True):
        assert np.array_equal(x, np.concatenate(xs))


@pytest.mark.usefixtures("small_groups")
def test_a_group_is_packed_when_one_of_its_samples_is_read():
    samples = PackedSamples([LENGTHS], 20, 0, 5)
    assert samples._packing_of_group.cache_info().misses == 0
    samples.segments(np.array([len(samples) // 2]))
    assert samples._packing_of_group.cache_info().misses == 1


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("lengths", [[500, 3, 3, 700], [1], [16] * 9, [15, 1, 33, 16, 2]])
def test_blocks_contain_the_documents_that_begin_in_them(lengths: list[int]):
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    expected = [list(group) for _, group in itertools.groupby(range(len(lengths)), lambda i: starts[i] // 16)]
    for cut in range(1, len(lengths) + 1):
        blocks = Blocks.of([np.array(shard, dtype=np.int32) for shard in (lengths[:cut], lengths[cut:]) if shard])
        assert blocks.first_document.tolist() == [*(group[0] for group in expected), len(lengths)]
        assert blocks.first_token.tolist() == [*(starts[group[0]] for group in expected), sum(lengths)]
    samples = PackedSamples([np.array(lengths)], 5, 0, 0)
    assert sorted(label_indices(samples.segments(np.arange(len(samples))))) == list(range(sum(lengths)))


@pytest.mark.parametrize(
    ("seq_len", "expected"),
    [(2, 2**22), (2**12, 2**22), (2**16, 2**26), (2**20, 2**26), (2**22, 2**26), (2**25, 2**29)],
)
def test_group_tokens_bound_padding_and_packing_time(seq_len: int, expected: int):
    assert group_tokens(seq_len) == expected


def test_groups_of_a_corpus_of_1e13_tokens():
    lengths = np.full(6000, 2**31 - 5, dtype=np.int32)  # each longer than a group
    samples = PackedSamples([lengths], 1000, 0, 0)
    assert samples._samples.tolist() == [2_147_484] * 6000


def test_the_order_is_pinned():
    # Later versions must resume runs of earlier ones, so these numbers must not change.
    samples = PackedSamples([np.array([5, 9, 3, 12, 1, 7])], 8, 1, 1234)
    assert samples.segments(np.arange(5, 10)).start.tolist() == [25, 14, 13, 0, -1, 17, 30, 29, 5]
