"""The text that `tost eval analyze` reads: where it stands, its documents, and what its words tell by themselves."""

import math
from collections import Counter

import pytest
import torch

from tost_lm.data.shards import Shards
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import DataError
from tost_lm.eval.analysis.layers import WORD_CLASSES, read_text, unigram_information, word_classes


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


def test_information_is_of_the_held_out_text(shards: Shards):
    text = [token for array in shards.token_arrays("valid") for token in array[:].tolist()]
    count = Counter(text)
    found = unigram_information(shards)
    assert len(found) == shards.vocab_size
    for word, nats in enumerate(found.tolist()):
        assert nats == pytest.approx(-math.log(count[word] / len(text)) if word in count else math.inf)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" little", "letters after a space"), ("ver", "letters without a space"), ("9", "number"),
        ("\n", "line break"), ("    ", "spaces"), (".", "punctuation"), ('."', "punctuation"), ("_", "punctuation"),
        ("é", "incomplete character"),
    ],
)  # fmt: skip
def test_words_have_a_class(tokenizer: Tokenizer, text: str, expected: str):
    ids = tokenizer.encode("a" + text)[1:]
    found = word_classes(tokenizer, torch.tensor(ids)).tolist()
    assert list(WORD_CLASSES)[found[0]] == expected


def test_the_end_of_text_is_a_class_of_its_own(tokenizer: Tokenizer):
    assert list(WORD_CLASSES)[int(word_classes(tokenizer, torch.tensor([tokenizer.eot])))] == "end of text"
