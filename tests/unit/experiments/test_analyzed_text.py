"""The text that the analyses read: where it stands and its documents."""

import pytest

from experiments.analysis.layers import read_text
from tost_lm.data.shards import Shards
from tost_lm.errors import DataError


def test_it_is_held_out_text_after_the_context(shards: Shards):
    text = [token for array in shards.token_arrays("valid") for token in array[:].tolist()]
    found = read_text(shards, 4, 10, 20)
    assert found.context_S.tolist() == text[:20]
    assert found.sequences_NT[0].tolist() == text[20:30]
    assert found.sequences_NT[-1].tolist() == text[-10:]
    assert found.sequences_NT.shape == found.documents_NT.shape == (4, 10)
    with pytest.raises(DataError, match=rf"too short .*: {len(text):,} tokens; lower memberships.context_tokens"):
        read_text(shards, 4, 10, len(text) - 39)


def test_documents_are_distinguished(shards: Shards):
    numbers = [n for n, document in enumerate(shards.documents("valid")) for _ in range(len(document) + 1)]
    found = read_text(shards, 3, len(numbers) // 3, 0)
    assert found.documents_NT[0].tolist() == numbers[: len(numbers) // 3]
    assert found.documents_NT[-1].tolist() == numbers[-(len(numbers) // 3) :]
    assert len(set(numbers)) > 5
    most = [max(set(row), key=row.count) for row in found.documents_NT.tolist()]
    assert [row.count(a) for row, a in zip(found.documents_NT.tolist(), most, strict=True)] == [
        row.count(b) for row, b in zip(found.documents_NT.tolist(), found.document_of.tolist(), strict=True)
    ]
