"""assert_close notices what it should."""

import pytest
import torch

from tost_lm.testing import assert_close


def test_is_relative_to_the_norm():
    expected = torch.tensor([3.0, 4.0, 0.0])
    assert_close(expected + torch.tensor([0.0, 0.0, 0.04]), expected, relative=0.01)
    with pytest.raises(AssertionError, match=r"gradient: off by 1\.20e-02"):
        assert_close(expected + torch.tensor([0.0, 0.0, 0.06]), expected, relative=0.01, what="gradient")


@pytest.mark.parametrize("wrong", [torch.tensor([1.0, float("nan")]), torch.ones(1, 2), torch.zeros(2)])
def test_nan_shape_and_zero_are_noticed(wrong: torch.Tensor):
    with pytest.raises(AssertionError):
        assert_close(wrong, torch.ones(2), relative=0.5)
