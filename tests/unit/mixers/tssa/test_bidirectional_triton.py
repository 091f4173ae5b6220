"""The Triton kernels of bidirectional TSSA, in Triton's interpreter where there is no GPU."""

import pytest
import torch
from bidirectional_cases import (
    CASES,
    EXTREMES,
    assert_costs_one_rounding,
    assert_is_the_formulas,
    draw,
)

pytest.importorskip("triton")
from test_launches import Launches

from tost_lm.mixers.tssa.bidirectional import tssa

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORWARD, BACKWARD = 12, 26


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_the_formulas(case: str):
    assert_is_the_formulas(CASES[case], "triton", DEVICE)


@pytest.mark.parametrize("value", ["65504.0", "1e-20"])
def test_extreme_values(value: str):
    assert_is_the_formulas(EXTREMES[value], "triton", DEVICE)


def test_low_precision_costs_one_rounding():
    call = draw(9, (9,), 2, 16)
    assert_costs_one_rounding(call, torch.float16, "triton", DEVICE)
    # The interpreter truncates to bfloat16; a GPU rounds.
    assert_costs_one_rounding(call, torch.bfloat16, "triton", DEVICE, limit=1.5 if DEVICE == "cuda" else 2.5)


@pytest.mark.skipif(DEVICE == "cuda", reason="counts in Triton's interpreter, which is for CPUs")
def test_launches():
    call = draw(10, (3, 6), 2, 16).to(torch.float32)
    w, temp, offsets = call.w.requires_grad_(), call.temp.requires_grad_(), torch.tensor(call.offsets)
    call.run("triton")  # layouts of chunks are cached
    with Launches() as forward:
        y = tssa(w, temp, cu_seqlens=offsets, backend="triton")
    with Launches() as backward:
        torch.autograd.grad(y, [w, temp], call.dy)
    assert forward.counts["scores_kernel"] == backward.counts["token_gradient_kernel"] == 1
    assert sum(forward.counts.values()) <= FORWARD, forward.counts
    assert sum(backward.counts.values()) <= BACKWARD, backward.counts
