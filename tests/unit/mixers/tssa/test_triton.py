"""The Triton backend against the formulas in float64, in Triton's interpreter where there is no GPU."""

from dataclasses import replace

import pytest
import torch
from agreement import TRITON, assert_accurate, draw_call
from triton_cases import (
    EXTREMES,
    SHAPES,
    SMALL_FIRST_TOKENS,
    assert_costs_one_rounding,
    assert_is_stable,
    assert_is_the_formulas,
    assert_largest_float16_is_no_overflow,
    assert_nan_stays,
)

from tost_lm.mixers.layer import HeadSoftmax
from tost_lm.mixers.tssa.causal import causal_tssa
from tost_lm.ops.layout import document_layout
from tost_lm.testing import assert_as_accurate

pytest.importorskip("triton")
from tost_lm.mixers.tssa.triton import backward, common, forward
from tost_lm.mixers.tssa.triton.common import sums

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TIERS = {
    "documents": pytest.mark.quick,
    **dict.fromkeys(("rows and a bias for each", "three chunks", "wide heads", "full chunks"), pytest.mark.slow),
}


@pytest.mark.parametrize("shape", [pytest.param(shape, marks=TIERS.get(shape, ())) for shape in SHAPES])
def test_outputs_states_and_gradients_are_the_formulas(shape: str):
    assert_is_the_formulas(SHAPES[shape], DEVICE)


@pytest.mark.parametrize("shape", [pytest.param("rows and a bias for each", marks=pytest.mark.slow), "five heads"])
def test_one_kernel_over_all_heads_as_in_long_calls(shape: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tost_lm.mixers.tssa.triton.common.FEW_CHUNKS", 0)
    assert_is_the_formulas(SHAPES[shape], DEVICE)


def test_the_softmax_of_the_caller_is_between_two_kernels():
    """As where tensor ranks have the heads."""
    assert_accurate(SHAPES["five heads"].on(DEVICE), lambda call: call.run(TRITON, HeadSoftmax()))


@pytest.mark.parametrize("scale", [pytest.param("1e-3", marks=pytest.mark.slow), "1e-5"])
def test_float32_is_stable_when_first_tokens_are_small(scale: str):
    assert_is_stable(SMALL_FIRST_TOKENS[scale], DEVICE)


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU has the instruction itself")
def test_the_approximate_reciprocal_of_gpus_is_accurate_enough(monkeypatch: pytest.MonkeyPatch):
    """Its error is at most one unit in the last place (PTX ISA, `rcp.approx.ftz.f32`). Here each has all of it."""
    for module in (common, forward, backward):
        monkeypatch.setattr(module, "reciprocal", lambda x: (1 / x) * (1 + 2**-23))
    for call in (SHAPES["five heads"], SMALL_FIRST_TOKENS["1e-3"]):
        assert_is_stable(call, DEVICE)


@pytest.mark.slow
@pytest.mark.parametrize("value", [65504.0, 1e-40])
def test_extreme_values(value: float):
    assert_is_the_formulas(EXTREMES[value], DEVICE)


@pytest.mark.slow
def test_low_precision_costs_one_rounding():
    call = draw_call(0, (33,), 2, 32)
    assert_costs_one_rounding(call, torch.float16, DEVICE)
    # The interpreter truncates to bfloat16; a GPU rounds.
    assert_costs_one_rounding(call, torch.bfloat16, DEVICE, limit=1.5 if DEVICE == "cuda" else 2.5)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # dw is larger than the largest float16
def test_largest_float16_is_no_overflow():
    assert_largest_float16_is_no_overflow(DEVICE)


@pytest.mark.slow
def test_a_nan_reaches_only_later_tokens_of_its_document():
    assert_nan_stays(DEVICE)


@pytest.mark.parametrize("temp", [50.0, pytest.param(-50.0, marks=pytest.mark.slow)])
def test_extreme_temperatures(temp: float):
    call = draw_call(0, (32,), 3, 16, fresh=True)
    assert_is_the_formulas(replace(call, temp=torch.full_like(call.temp, temp)), DEVICE)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("lengths", [(100, 28), (600, 1, 512)])
def test_scans_of_several_steps_and_documents(lengths: tuple[int, ...], reverse: bool):
    offsets = torch.tensor((0, *lengths)).cumsum(0)
    layout = document_layout(tuple((offsets * 32).tolist()), 32, torch.device(DEVICE))
    sum_K = torch.randn(len(layout.start_K), 3, 3, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    found = sums(sum_K, layout, reverse)
    for n, of_document_K in enumerate(sum_K.split(lengths)):
        of_document_K = of_document_K.flip(0) if reverse else of_document_K
        truth_K, plain_K = (of_document_K.to(dtype).cumsum(0) for dtype in (torch.float64, torch.float32))
        chunk_K = found.chunk[offsets[n] : offsets[n + 1]]
        chunk_K = chunk_K.flip(0) if reverse else chunk_K
        assert not chunk_K[0].any()
        assert_as_accurate(found.document[n], plain_K[-1], truth_K[-1])
        if len(truth_K) > 1:
            assert_as_accurate(chunk_K[1:], plain_K[:-1], truth_K[:-1])


def test_no_bias_is_a_bias_of_zero():
    w, temp = torch.randn(1, 5, 2, 16, device=DEVICE), torch.ones(2, device=DEVICE)
    without, _ = causal_tssa(w, temp, backend=TRITON)
    zero, _ = causal_tssa(w, temp, torch.zeros(2, 5, device=DEVICE), backend=TRITON)
    assert torch.equal(without, zero)
