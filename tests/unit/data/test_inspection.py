"""Statistics of shards agree with direct counts."""

import numpy as np

from tost_lm.data.shards import length_histogram


def test_buckets_count_every_document_once():
    lengths = np.concatenate([np.arange(1, 20), [2**30 - 1, 2**30, 2**31 - 1]]).astype(np.int32)
    buckets = length_histogram(lengths)
    for shortest, longest, documents in buckets:
        assert documents == np.count_nonzero((lengths >= shortest) & (lengths <= longest))
    assert sum(documents for _, _, documents in buckets) == len(lengths)
    assert [shortest for shortest, _, _ in buckets] == [2**e for e in range(31)]
    assert length_histogram(np.array([5, 6]))[0] == (4, 7, 2)
