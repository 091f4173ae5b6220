"""Standard errors over documents: the usual one where each sequence is a document, and wider where they are alike."""

import pytest
import torch

from tost_lm.analysis.errors import standard_error

VALUES = torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_of_a_document_each_it_is_the_usual_one():
    found = standard_error(VALUES, torch.arange(12) * 7)
    torch.testing.assert_close(found, VALUES.std(0) / 12**0.5)


def test_of_equal_pairs_it_is_that_of_half_as_many():
    twice = VALUES.repeat_interleave(2, 0)
    found = standard_error(twice, torch.arange(12).repeat_interleave(2))
    torch.testing.assert_close(found, VALUES.std(0) / 12**0.5)
    apart = standard_error(twice, torch.arange(24))
    assert apart is not None
    assert (apart < 0.75 * VALUES.std(0) / 12**0.5).all()


def test_of_plain_numbers_and_of_one_document():
    assert standard_error(torch.tensor([1.0, 3]), torch.tensor([4, 9])) == pytest.approx(1)
    assert standard_error(VALUES, torch.zeros(12, dtype=torch.int64)) is None
