"""The values that assert_close and assert_as_accurate accept and refuse."""

import pytest
import torch

from tost_lm.testing import assert_as_accurate, assert_close

NAN, INF = float("nan"), float("inf")


def test_assert_close_is_relative_to_the_norm():
    expected = torch.tensor([3.0, 4.0, 0.0])
    assert_close(expected + torch.tensor([0.0, 0.0, 0.04]), expected, relative=0.01)
    with pytest.raises(AssertionError, match=r"gradient: off by 1\.20e-02"):
        assert_close(expected + torch.tensor([0.0, 0.0, 0.06]), expected, relative=0.01, what="gradient")


@pytest.mark.parametrize("wrong", [torch.tensor([1.0, NAN]), torch.ones(1, 2), torch.zeros(2)])
def test_assert_close_refuses_nan_another_shape_and_zero(wrong: torch.Tensor):
    with pytest.raises(AssertionError):
        assert_close(wrong, torch.ones(2), relative=0.5)


def test_assert_as_accurate_allows_a_multiple_of_the_reference_error():
    truth = torch.tensor([3.0, 4.0], dtype=torch.float64)
    theirs = torch.tensor([3.0, 4.01])
    assert_as_accurate(torch.tensor([3.019, 4.0]), theirs, truth, factor=2)
    with pytest.raises(AssertionError, match=r"dw: error 2\.1\d*e-02, allowed 2\.0\d*e-02; reference error 1\.0"):
        assert_as_accurate(torch.tensor([3.021, 4.0]), theirs, truth, factor=2, what="dw")


def test_assert_as_accurate_allows_roundings_beside_an_exact_reference():
    truth = torch.ones(4, dtype=torch.float64)
    epsilon = torch.finfo(torch.float32).eps
    assert_as_accurate((truth + 2 * epsilon).float(), truth, truth, factor=3)
    with pytest.raises(AssertionError):
        assert_as_accurate((truth + 4 * epsilon).float(), truth, truth, factor=3)


@pytest.mark.parametrize(
    ("ours", "theirs"), [([1.0, NAN], [1.0, 1.0]), ([1.0, 1.0], [1.0, NAN]), ([1.0, 1.0], [1.0, INF]), ([1.0], [1.0])]
)
def test_assert_as_accurate_refuses_nan_infinity_and_another_shape(ours: list[float], theirs: list[float]):
    with pytest.raises(AssertionError):
        assert_as_accurate(torch.tensor(ours), torch.tensor(theirs), torch.ones(2, dtype=torch.float64), factor=9)
