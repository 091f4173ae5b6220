"""The operator against loops over the published formulas, and the one state that serves chaining and decoding."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import causal_tssa_by_loops

from tost_lm.ops import TssaState, causal_tssa, tssa, tssa_step

MEMBERSHIPS = ["energy-share", "energy-mean", "uniform"]


def inputs(seed: int, B: int, T: int, H: int, D: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)
    return draw(B, T, H, D), 1 + 0.5 * draw(H), 0.3 * draw(H, T)


@given(st.integers(0, 99), st.integers(1, 2), st.integers(1, 9), st.integers(1, 4), st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_equals_loops_over_the_formulas(seed: int, B: int, T: int, H: int, D: int):
    w, temp, bias = inputs(seed, B, T, H, D)
    leaves = [x.requires_grad_() for x in (w, temp, bias)]
    ours, theirs = causal_tssa(w, temp, bias)[0], causal_tssa_by_loops(w, temp, bias)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    g = torch.randn_like(ours)
    for a, b in zip(torch.autograd.grad(ours, leaves, g), torch.autograd.grad(theirs, leaves, g), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("membership", MEMBERSHIPS)
@pytest.mark.parametrize("cut", [1, 4, 10])
def test_two_calls_chained_by_state_are_one_call(membership, cut: int):
    w, temp, bias = inputs(0, 2, 11, 3, 4)
    whole, end = causal_tssa(w, temp, bias, membership=membership, output_final_state=True)
    first, state = causal_tssa(w[:, :cut], temp, bias[:, :cut], membership=membership, output_final_state=True)
    second, end_2 = causal_tssa(
        w[:, cut:], temp, bias[:, cut:], membership=membership, initial_state=state, output_final_state=True
    )
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-12, atol=1e-12)
    assert end is not None
    assert end_2 is not None
    for a, b in zip(end, end_2, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("membership", MEMBERSHIPS)
def test_one_token_at_a_time_is_the_parallel_form(membership):
    w, temp, bias = inputs(1, 2, 9, 3, 4)
    whole, _ = causal_tssa(w, temp, bias, membership=membership)
    state = TssaState.empty(2, 3, 4, like=w)
    for t in range(9):
        y_t, state = tssa_step(w[:, t], temp, bias[:, t], state, membership=membership)
        torch.testing.assert_close(y_t, whole[:, t], rtol=1e-12, atol=1e-12)


def test_packed_documents_are_separate_documents():
    w, temp, _ = inputs(2, 1, 10, 3, 4)
    bias = torch.randn(3, 10, dtype=torch.float64)
    packed, state = causal_tssa(
        w, temp, bias, cu_seqlens=torch.tensor([0, 1, 6, 10], dtype=torch.int32), output_final_state=True
    )
    assert state is not None
    for n, (start, end) in enumerate([(0, 1), (1, 6), (6, 10)]):
        alone, last = causal_tssa(w[:, start:end], temp, bias[:, start:end], output_final_state=True)
        assert last is not None
        torch.testing.assert_close(packed[:, start:end], alone, rtol=0, atol=0)
        torch.testing.assert_close(state.mass[n], last.mass[0], rtol=0, atol=0)
        assert state.count[n] == end - start


def test_bias_may_differ_between_sequences():
    w, temp, _ = inputs(3, 2, 5, 3, 4)
    bias_BHT = torch.randn(2, 3, 5, dtype=torch.float64)
    both, _ = causal_tssa(w, temp, bias_BHT)
    for b in range(2):
        torch.testing.assert_close(both[b : b + 1], causal_tssa(w[b : b + 1], temp, bias_BHT[b])[0])


def test_energy_mean_divides_by_the_running_mean():
    w, temp, _ = inputs(4, 1, 6, 2, 3)
    y, _ = causal_tssa(w, temp, membership="energy-mean")
    mean_BTHD = w.square().cumsum(1) / torch.arange(1, 7)[:, None, None]
    pi = (temp * (w.square() / mean_BTHD).mean(-1)).softmax(-1)[..., None]
    moment = (pi * w.square()).cumsum(1) / (pi.cumsum(1) + 1e-8)
    torch.testing.assert_close(y, -pi * w / (1 + moment), rtol=1e-12, atol=1e-12)


def test_uniform_membership_is_one_over_heads():
    w, temp, bias = inputs(5, 1, 1, 4, 3)
    y, _ = causal_tssa(w, temp, bias, membership="uniform")
    torch.testing.assert_close(y, -0.25 * w / (1 + w.square()), rtol=1e-6, atol=1e-7)


def test_statistics_of_low_precision_inputs_are_float32():
    w, temp, bias = (x.bfloat16() for x in inputs(6, 1, 64, 2, 4))
    y, state = causal_tssa(w, temp, bias, output_final_state=True)
    assert state is not None
    assert (y.dtype, state.energy.dtype, state.mass.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    exact, _ = causal_tssa(w.double(), temp.double(), bias.double())
    assert (y.double() - exact).abs().max() <= 2**-8 * exact.abs().max()


def test_bidirectional_form_ignores_padding():
    w, temp, _ = inputs(7, 2, 6, 3, 4)
    mask = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    padded = tssa(w, temp, mask)
    torch.testing.assert_close(padded[1:, :4], tssa(w[1:, :4], temp), rtol=1e-12, atol=1e-12)
    assert padded[1, 4:].abs().max() == 0


def test_bidirectional_form_is_the_papers():
    w, temp, _ = inputs(8, 1, 5, 2, 3)
    normed = w / w.norm(dim=1, keepdim=True)
    pi = (temp * normed.square().sum(-1)).softmax(-1)[..., None]
    moment = (pi / (pi.sum(1, keepdim=True) + 1e-8) * w.square()).sum(1, keepdim=True)
    torch.testing.assert_close(tssa(w, temp), -w * pi / (1 + moment), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": torch.zeros(2, 0, 3, 4)}, "T ≥ 1"),
        ({"temp": torch.ones(2)}, r"temp must be \[H\]"),
        ({"bias": torch.zeros(3, 4)}, "bias must be"),
        ({"membership": "softmax"}, "membership 'softmax'"),
        ({"backend": "cuda"}, "backend 'cuda'"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "cu_seqlens"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change: dict, message: str):
    arguments: dict[str, Any] = {"w": torch.ones(2, 5, 3, 4), "temp": torch.ones(3), "bias": torch.zeros(3, 5)} | change
    with pytest.raises(ValueError, match=message):
        causal_tssa(**arguments)
