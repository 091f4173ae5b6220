"""The Triton backend on a GPU: the cases of the interpreter's tests, random shapes, and calls too large for it."""

import random

import pytest
import torch
from agreement import Call, draw_call, errors
from triton_cases import (
    EXTREMES,
    SHAPES,
    SMALL_FIRST_TOKENS,
    assert_costs_one_rounding,
    assert_is_stable,
    assert_is_the_formulas,
    assert_largest_float16_is_no_overflow,
    assert_nan_stays,
    run,
)

from tost_lm.mixers.tssa.causal import causal_tssa

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("triton")


@pytest.fixture(params=[0, 1024], ids=["one kernel over all heads", "a program for each head"], autouse=True)
def few_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tost_lm.mixers.tssa.triton.common.FEW_CHUNKS", request.param)


@pytest.mark.parametrize("call", [*SHAPES.values(), *EXTREMES.values()])
def test_outputs_states_and_gradients_are_the_formulas(call: Call):
    assert_is_the_formulas(call, "cuda")


@pytest.mark.parametrize("call", SMALL_FIRST_TOKENS.values())
def test_float32_is_stable_when_first_tokens_are_small(call: Call):
    assert_is_stable(call, "cuda")


@pytest.mark.parametrize("seed", range(12))
def test_random_shapes(seed: int):
    draw = random.Random(seed)
    lengths = draw.choices([1, 2, 31, 32, 33, 100, 1000], k=draw.randint(1, 20))
    H, D = draw.randint(1, 64), draw.choice([16, 20, 32, 48, 64, 80, 128, 200, 256])
    assert_is_the_formulas(draw_call(seed, tuple(lengths), H, D), "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_costs_one_rounding(dtype: torch.dtype):
    assert_costs_one_rounding(draw_call(0, (300,), 12, 64), dtype, "cuda")


def test_largest_float16_is_no_overflow():
    assert_largest_float16_is_no_overflow("cuda")


def test_a_nan_reaches_only_later_tokens_of_its_document():
    assert_nan_stays("cuda")


def test_the_same_inputs_give_the_same_bits():
    call = draw_call(0, (1000,) * 4, 12, 64, packed=False).on("cuda").to(torch.bfloat16)
    first, second = run(call), run(call)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_float64_uses_the_chunked_backend():
    call = draw_call(0, (100, 3), 4, 16).on("cuda")
    assert max(errors(call.run(None), call.run("naive")).values()) < 1e-12


def test_more_than_two_to_the_31_elements():
    """The last document of a call, beyond 32-bit offsets, has the outputs that it has alone."""
    H, D, last = 16, 128, 5000
    T = 2**31 // (H * D) + 2 * last
    needed, free = 10 * T * H * D, torch.cuda.mem_get_info()[0]
    if free < needed:
        pytest.skip(f"needs {needed >> 30} GiB of free GPU memory; {free >> 30} are free")
    w = torch.randn(1, T, H, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    temp = torch.ones(H, device="cuda")
    offsets = torch.tensor([0, T - last, T], dtype=torch.int32, device="cuda")
    y, _ = causal_tssa(w, temp, cu_seqlens=offsets, backend="triton")
    alone = w[:, -last:].detach().requires_grad_()
    y_alone, _ = causal_tssa(alone, temp, backend="triton")
    torch.testing.assert_close(y[:, -last:], y_alone, rtol=0.02, atol=1e-5)
    (dw,) = torch.autograd.grad(y[:, -last:].float().sum(), w)
    (dw_alone,) = torch.autograd.grad(y_alone.float().sum(), alone)
    torch.testing.assert_close(dw[:, -last:], dw_alone, rtol=0.02, atol=1e-5)
    assert not dw[:, :-last].any()
