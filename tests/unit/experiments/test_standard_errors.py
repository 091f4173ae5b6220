"""Standard errors over documents: the usual one where each sequence is a document, larger where sequences share one."""

import pytest
import torch

from experiments.analysis.layers import standard_error

VALUES = torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_a_document_per_sequence_gives_the_usual_standard_error():
    found = standard_error(VALUES, torch.arange(12) * 7)
    torch.testing.assert_close(found, VALUES.std(0) / 12**0.5)


def test_equal_pairs_count_as_half_as_many_sequences():
    twice = VALUES.repeat_interleave(2, 0)
    found = standard_error(twice, torch.arange(12).repeat_interleave(2))
    torch.testing.assert_close(found, VALUES.std(0) / 12**0.5)
    independent = standard_error(twice, torch.arange(24))
    assert independent is not None
    assert (independent < 0.75 * VALUES.std(0) / 12**0.5).all()


def test_plain_numbers_and_a_single_document():
    assert standard_error(torch.tensor([1.0, 3]), torch.tensor([4, 9])) == pytest.approx(1)
    assert standard_error(VALUES, torch.zeros(12, dtype=torch.int64)) is None
