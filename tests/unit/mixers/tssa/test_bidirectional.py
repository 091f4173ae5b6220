"""Bidirectional TSSA: the formulas of the paper, the chunked backend, documents, precision, and error messages."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from bidirectional_cases import (
    CASES,
    EXTREMES,
    NAMES,
    Call,
    assert_costs_one_rounding,
    assert_is_the_formulas,
    assert_nan_stays,
    assert_single_tokens_have_the_output_of_one,
    draw,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from test_no_matrix_products import PRODUCT, CalledOperators
from torch import Tensor
from torch.nn.functional import normalize

from tost_lm.mixers.tssa import bidirectional_chunked, naive
from tost_lm.mixers.tssa.bidirectional import tssa
from tost_lm.mixers.tssa.phases import LocalSoftmax
from tost_lm.testing import assert_close

LENGTHS = (1, 35, 2, 64, 1, 33)


@pytest.fixture
def _chunks_of_32_tokens(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bidirectional_chunked, "chunk_tokens", lambda heads, channels, device: 32)


def as_published(w_BTHD: Tensor, temp_H: Tensor) -> Tensor:
    """The operator in the order of operations of the released vision code, written from the paper's equations."""
    w_BHTD = w_BTHD.transpose(1, 2)
    pi_BHT = ((normalize(w_BHTD, dim=2) ** 2).sum(-1) * temp_H[:, None]).softmax(1)
    weights_BHT = pi_BHT / (pi_BHT.sum(-1, keepdim=True) + 1e-8)
    moment_BHD = torch.stack([(weights_BHT[..., None] * w_BHTD**2)[:, :, t] for t in range(w_BTHD.shape[1])]).sum(0)
    return (-(w_BHTD * pi_BHT[..., None]) / (1 + moment_BHD[:, :, None])).transpose(1, 2)


@pytest.mark.parametrize("function", [naive.tssa, tssa])
@given(st.integers(0, 99), st.integers(1, 3), st.integers(1, 9), st.integers(1, 4), st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_equals_the_paper(function, seed: int, B: int, T: int, H: int, D: int):
    call = draw(seed, (B * T,), H, D)
    leaves = [call.w.view(B, T, H, D).requires_grad_(), call.temp.requires_grad_()]
    ours, theirs = function(*leaves), as_published(*leaves)
    assert_close(ours, theirs, 1e-13, "y")
    dy = call.dy.view_as(ours)
    for name, a, b in zip(("dw", "d_temp"), *(torch.autograd.grad(y, leaves, dy) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.usefixtures("_chunks_of_32_tokens")
@pytest.mark.parametrize("lengths", [LENGTHS, (7,) * 9, (32,) * 3, (100,)])
def test_packed_documents_equal_each_alone(lengths: tuple[int, ...]):
    call = draw(0, lengths, 3, 4)
    ours, truth = call.run(), call.reference()
    for name in NAMES:
        assert_close(ours[name], truth[name], 1e-13, name)
    alone = torch.cat([tssa(call.w[:, a:b], call.temp) for a, b in pairwise(call.offsets)], 1)
    assert_close(ours["y"], alone, 1e-13)


def test_rows_of_a_batch_are_documents():
    call = draw(1, (20,) * 5, 3, 4)
    rows = tssa(call.w.view(5, 20, 3, 4), call.temp)
    assert torch.equal(rows.view_as(call.w), call.run()["y"])


@pytest.mark.usefixtures("_chunks_of_32_tokens")
def test_gradcheck():
    call = draw(2, (3, 1, 36), 2, 3)
    f = lambda w, temp: tssa(w, temp, cu_seqlens=torch.tensor(call.offsets))
    assert torch.autograd.gradcheck(f, [call.w.requires_grad_(), call.temp.requires_grad_()], fast_mode=True)


@pytest.mark.usefixtures("_chunks_of_32_tokens")
def test_permuted_tokens_of_a_document_have_permuted_outputs():
    call = draw(3, (5, 70), 3, 4)
    order = torch.cat([torch.arange(5), 5 + torch.randperm(70, generator=torch.Generator().manual_seed(0))])
    permuted = tssa(call.w[:, order], call.temp, cu_seqlens=torch.tensor(call.offsets))
    assert_close(permuted, call.run()["y"][:, order], 1e-13)


@pytest.mark.usefixtures("_chunks_of_32_tokens")
@pytest.mark.parametrize("call", [*CASES.values(), *EXTREMES.values()], ids=[*CASES, *EXTREMES])
def test_float32_is_as_accurate_as_the_formulas(call: Call):
    assert_is_the_formulas(call, "chunked")


def test_low_precision_costs_one_rounding():
    for dtype in (torch.bfloat16, torch.float16):
        assert_costs_one_rounding(CASES["full chunks"], dtype, "chunked", "cpu")


def test_single_tokens_are_exact():
    assert_single_tokens_have_the_output_of_one("chunked", "cpu")


def test_a_nan_stays_in_its_document():
    assert_nan_stays("chunked", "cpu")


def test_autocast_does_not_touch_the_statistics():
    call = draw(4, (40,), 2, 8).to(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = call.run()
    assert all(torch.equal(inside[name], x) for name, x in call.run().items())


def test_the_backward_stores_w_and_memberships_only():
    w, kept = torch.randn(1, 4096, 4, 64, requires_grad=True), {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.update({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()}) or x, lambda x: x
    ):
        tssa(w, torch.ones(4, requires_grad=True))
    assert sum(kept.values()) < 4 * w.numel() * (1 + 1 / 64 + 0.01)


def test_there_are_no_matrix_products():
    with CalledOperators() as called:
        draw(5, (40, 20), 3, 8).run("chunked")
    assert {"mul", "sum"} <= called.names
    assert not {name for name in called.names if PRODUCT.search(name)}


def test_the_softmax_over_heads_may_be_given():
    class OtherSoftmax(LocalSoftmax):
        def forward(self, z_MH: Tensor) -> Tensor:
            return super().forward(-z_MH)

    call = draw(6, (9,), 3, 4)
    assert_close(tssa(call.w, call.temp, heads=OtherSoftmax()), tssa(call.w, -call.temp), 1e-14)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": torch.zeros(2, 0, 3, 4)}, "with no size 0"),
        ({"w": torch.ones(2, 5, 3, 4).long()}, "floating point"),
        ({"temp": torch.ones(2)}, r"temp must be \[H\] = \[3\]"),
        ({"backend": "naive"}, "unknown backend: 'naive'; use one of triton, chunked"),
        ({"w": torch.ones(2, 5, 3, 4).double(), "backend": "triton"}, "backend 'triton' cannot run here"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "cu_seqlens must rise from 0 to T = 5 with B == 1"),
    ],
)
def test_invalid_inputs_are_refused(change: dict[str, Any], message: str):
    arguments: dict[str, Any] = {"w": torch.ones(2, 5, 3, 4), "temp": torch.ones(3)} | change
    with pytest.raises(ValueError, match=message):
        tssa(**arguments)
