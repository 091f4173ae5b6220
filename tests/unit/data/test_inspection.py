"""Statistics of shards agree with direct counts."""

from collections import Counter

import numpy as np
import pytest

from tost_lm.data import shards
from tost_lm.data.shards import Shards, length_histogram, token_counts


def test_buckets_count_every_document_once():
    lengths = np.concatenate([np.arange(1, 20), [2**30 - 1, 2**30, 2**31 - 1]]).astype(np.int32)
    buckets = length_histogram(lengths)
    for shortest, longest, documents in buckets:
        assert documents == np.count_nonzero((lengths >= shortest) & (lengths <= longest))
    assert sum(documents for _, _, documents in buckets) == len(lengths)
    assert [shortest for shortest, _, _ in buckets] == [2**e for e in range(31)]
    assert length_histogram(np.array([5, 6]))[0] == (4, 7, 2)


@pytest.mark.parametrize("chunk", [100, 1 << 24])
def test_token_counts(built, monkeypatch, chunk):
    monkeypatch.setattr(shards, "COUNTED_TOKENS", chunk)
    opened = Shards.open(built.config.shards.folder)
    by_hand = Counter(token for tokens in opened.token_arrays("train") for token in tokens[:].tolist())
    assert token_counts(opened, "train").tolist() == [by_hand[token] for token in range(opened.vocab_size)]
