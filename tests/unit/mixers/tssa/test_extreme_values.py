"""Extreme values: the backends of CPUs in float32 against the formulas."""

import pytest
import torch
from agreement import assert_accurate, draw_call, errors

from tost_lm.testing import assert_as_accurate

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("chunks_of_32_tokens")]


@pytest.mark.parametrize("value", [0.0, 65504.0, -65504.0, 1e-20, 1e-40], ids=str)
@pytest.mark.parametrize("where", [slice(None), slice(0, 3), slice(40, 41)], ids=["all", "first", "one"])
def test_extreme_values_are_as_accurate_as_the_formulas(value: float, where: slice):
    call = draw_call(0, (50, 20), 3, 4, fresh=True)
    call.w[:, where] = value
    call.w.copy_(call.w.float())
    assert_accurate(call, lambda call: call.run("chunked"))


@pytest.mark.parametrize("temp", [50.0, -50.0])
def test_extreme_temperatures(temp: float):
    call = draw_call(1, (50, 20), 3, 4, fresh=True)
    call.temp[1] = temp
    assert_accurate(call, lambda call: call.run("chunked"))
    assert max(errors(call.run("chunked"), call.run("naive")).values()) < 1e-12


@pytest.mark.parametrize("value", [65504.0, 1e-7])
def test_the_range_of_float16(value: float):
    call = draw_call(2, (50,), 3, 4, fresh=True)
    call.w[:, 5] = value
    half = call.to(torch.float16)
    wide = half.to(torch.float64)
    found, truth = half.run("chunked"), wide.run("naive")
    assert errors(found, truth)["y"] < 2**-10
    assert_as_accurate(found["energy"], wide.to(torch.float32).run("naive")["energy"], truth["energy"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_token_that_is_not_finite_reaches_only_later_tokens_of_its_document(bad: float):
    call = draw_call(3, (40, 45, 30), 3, 4, fresh=True)
    clean = call.run("chunked")
    call.w[0, 40 + 33, 1, 2] = bad
    spoiled = call.run("chunked")
    before, inside, after = slice(0, 73), slice(73, 85), slice(85, 115)
    assert torch.equal(spoiled["y"][:, before], clean["y"][:, before])
    assert torch.equal(spoiled["y"][:, after], clean["y"][:, after])
    assert spoiled["y"][:, inside].isnan().all()
    for document, tokens in ((0, slice(0, 40)), (2, after)):
        assert torch.equal(spoiled["dw"][:, tokens], clean["dw"][:, tokens])
        assert torch.equal(spoiled["energy"][document], clean["energy"][document])


def test_a_gradient_that_is_not_finite_reaches_only_earlier_tokens_of_its_document():
    call = draw_call(4, (40, 45), 3, 4, fresh=True)
    clean = call.run("chunked")
    call.d_outputs[0][0, 60] = float("nan")
    spoiled = call.run("chunked")
    assert torch.equal(spoiled["dw"][:, :40], clean["dw"][:, :40])
    assert torch.equal(spoiled["dw"][:, 61:], clean["dw"][:, 61:])
    assert spoiled["dw"][:, 40:61].isnan().any()
