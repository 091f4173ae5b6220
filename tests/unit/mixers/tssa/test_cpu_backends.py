"""The backends of CPUs against the formulas: values, gradients, dtypes and memory."""

from functools import partial

import pytest
import torch
from agreement import Call, assert_accurate, draw_call, errors
from hypothesis import given, settings
from random_calls import calls

from tost_lm.mixers.layer import HeadSoftmax
from tost_lm.mixers.tssa.causal import causal_tssa
from tost_lm.testing import assert_as_accurate

pytestmark = pytest.mark.usefixtures("chunks_of_32_tokens")


@pytest.mark.quick
@given(call=calls())
@settings(max_examples=60, deadline=None)
def test_equals_the_formulas_in_float64(call: Call):
    found = errors(call.run("chunked"), call.run("naive"))
    cancelling = found.pop("d_temp"), found.pop("d_bias")  # in the formulas, where one head takes nearly all of a token
    assert max(found.values()) < 1e-11
    assert max(cancelling) < 1e-8


@pytest.mark.quick
@given(call=calls())
@settings(max_examples=40, deadline=None)
def test_float32_is_as_accurate_as_the_formulas_in_float32(call: Call):
    assert_accurate(call, lambda call: call.run("chunked"))


@pytest.mark.parametrize("first", [1e-3, 1e-5])
@pytest.mark.parametrize(("H", "D"), [(4, 8), (12, 64)])
@pytest.mark.parametrize("seed", range(8))  # in some, one head has nearly the whole membership of the first token
def test_float32_is_stable_when_the_first_token_is_small(seed: int, H: int, D: int, first: float):
    call = draw_call(seed, (100,), H, D, fresh=True)
    call.w[:, :1] *= first
    call.w.copy_(call.w.float())
    # The formulas in float32 cancel here: their dw is off by up to 1e-3.
    assert_accurate(call, lambda call: call.run("chunked"), reference=call.rounded().run("naive"))


def test_bfloat16_adds_one_rounding_of_y_and_dw():
    call = draw_call(1, (100, 40), 4, 16).to(torch.bfloat16)
    wide = call.to(torch.float64)
    truth, reference, found = wide.run("naive"), wide.to(torch.float32).run("naive"), call.run("chunked")
    for name in ("y", "dw"):
        error, rounding = (x.double() - truth[name] for x in (found[name], truth[name].bfloat16()))
        assert error.norm() <= 1.5 * rounding.norm()
    for name in ("energy", "weighted_energy", "mass", "d_temp", "d_bias"):
        assert found[name].dtype == torch.float32
        assert_as_accurate(found[name], reference[name], truth[name], name)


def test_memory_kept_for_the_backward():
    w = torch.randn(1, 4096, 4, 64, requires_grad=True)
    kept: dict[int, int] = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.update({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()}) or x, lambda x: x
    ):
        causal_tssa(w, torch.ones(4, requires_grad=True), backend="chunked")
    w_bytes = 4 * w.numel()
    extra = sum(kept.values()) - w_bytes
    assert extra < w_bytes * (1 / 64 + 2 / 32 + 0.01)  # Π is 1/64 of w; the two sums before each chunk 1/16


def test_autocast_does_not_touch_the_statistics():
    call = draw_call(3, (70,), 3, 8).to(torch.bfloat16)
    plain = call.run("chunked")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = call.run("chunked")
    for name, x in plain.items():
        assert torch.equal(under_autocast[name], x)
        assert under_autocast[name].dtype == x.dtype


def test_a_float64_state_stays_float64_beside_float32_tokens():
    call = draw_call(4, (40,), 2, 4)
    narrow = call.to(torch.float32)
    _, final = causal_tssa(
        narrow.w, narrow.temp, initial_state=call.state, output_final_state=True, cu_seqlens=call.cu_seqlens
    )
    assert final is not None
    assert (final.energy.dtype, final.mass.dtype) == (torch.float64, torch.float64)


def test_training_follows_inference_of_the_same_shape():
    w_BTHD = torch.randn(37, 9, 2, 4, requires_grad=True)  # rows of no other test, so nothing is cached
    call = partial(causal_tssa, temp=torch.ones(2), heads=HeadSoftmax())
    with torch.inference_mode():
        call(w_BTHD)
    call(w_BTHD)[0].sum().backward()
