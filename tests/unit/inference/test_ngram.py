"""Byte n-grams: the vectorised tables give the probabilities of the formula in plain Python."""

import math
from collections import Counter

import numpy as np
import pytest

from tost_lm.tasks import ngrams
from tost_lm.tasks.ngrams import BASELINES, ByteNgrams

TRAINING = [b"abracadabra", b"", b"a", b"ab", b"banana band", bytes(range(250, 256)) * 2, b"\0\0\0\0"]
HELDOUT = [b"abba", b"n", b"", b"xyz banana", b"\xff\xfe\0\0\0", b"cadab"]


def plain_probability(training: list[bytes], context: bytes, byte: int) -> float:
    """The formula of Witten-Bell, with new counts for every byte."""
    below = plain_probability(training, context[1:], byte) if context else 1 / 256
    after = Counter(
        text[i] for text in training for i in range(len(context), len(text)) if text[i - len(context) : i] == context
    )
    if not after:
        return below
    return (after[byte] + len(after) * below) / (after.total() + len(after))


@pytest.mark.parametrize("tile_bytes", [1, 3, 1000])
def test_equals_plain_python(monkeypatch, tile_bytes):
    monkeypatch.setattr(ngrams, "TILE_BYTES", tile_bytes)
    counts = ByteNgrams(TRAINING)
    assert counts.bytes == sum(map(len, TRAINING))
    for document in HELDOUT:
        expected = [
            [plain_probability(TRAINING, document[max(0, i - n) : i], byte) for i, byte in enumerate(document)]
            for n in (0, 1, 2)
        ]
        np.testing.assert_allclose(counts.probabilities(document), expected, rtol=1e-12)


@pytest.mark.parametrize("context", [b"", b"a", b"br", b"zz", b"\0\0", b"an"])
def test_probabilities_sum_to_one(context):
    counts = ByteNgrams(TRAINING)
    last = [counts.probabilities(context + bytes([byte]))[:, -1] for byte in range(256)]
    np.testing.assert_allclose(np.sum(last, axis=0), 1, rtol=1e-12)


def test_bits_of_each_document():
    counts = ByteNgrams(TRAINING)
    bits = counts.bits(HELDOUT)
    assert bits.shape == (len(BASELINES), len(HELDOUT))
    expected = -sum(math.log2(plain_probability(TRAINING, b"", byte)) for byte in b"abba")
    assert bits[0, 0] == pytest.approx(expected)
    assert bits[:, HELDOUT.index(b"")].tolist() == [0, 0, 0]
