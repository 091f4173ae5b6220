"""The operator's options and its error messages."""

from typing import Any

import pytest
import torch

from tost_lm.mixers.tssa.causal import causal_tssa, tssa_step
from tost_lm.mixers.tssa.statistics import TssaState

pytestmark = pytest.mark.quick


def test_single_tokens_of_a_wrong_shape_are_refused():
    state = TssaState.empty(2, 3, 4, torch.ones(1))
    for w_t, temp, message in (
        (torch.ones(1, 3, 4), torch.ones(3), "the state holds 2 documents, the input 1"),
        (torch.ones(2, 3, 4), torch.ones(1), r"temp must be \[H\] = \[3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            tssa_step(w_t, temp, None, state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": torch.zeros(2, 0, 3, 4)}, "with no size 0"),
        ({"temp": torch.ones(2)}, r"temp must be \[H\]"),
        ({"bias": torch.zeros(3, 4)}, "bias must be"),
        ({"backend": "cuda"}, "unknown backend: 'cuda'; use one of triton, chunked"),
        ({"w": torch.ones(2, 5, 3, 4).long()}, "floating point"),
        ({"initial_state": TssaState.empty(1, 3, 4, torch.ones(1))}, "the state holds 1 documents, the input 2"),
        ({"w": torch.ones(0, 5, 3, 4)}, "with no size 0"),
        ({"cu_seqlens": torch.tensor([0.0, 5.0])}, "cu_seqlens must be integers"),
        ({"cu_seqlens": torch.tensor(5)}, "cu_seqlens must be integers"),
        ({"initial_state": TssaState.empty(2, 4, 3, torch.ones(1))}, r"energy of the state must be \[2, 3, 4\]"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "cu_seqlens"),
    ],
)
def test_invalid_inputs_are_refused(change: dict, message: str):
    arguments: dict[str, Any] = {"w": torch.ones(2, 5, 3, 4), "temp": torch.ones(3), "bias": torch.zeros(3, 5)} | change
    with pytest.raises(ValueError, match=message):
        causal_tssa(**arguments)


def test_a_backend_that_cannot_run_gives_the_reason():
    reasons = {"is on cpu": torch.ones(1, 4, 2, 3), "65 heads of 3 channels": torch.ones(1, 4, 65, 3)}
    if torch.cuda.is_available():
        reasons = {
            "float64": torch.ones(1, 4, 2, 3, device="cuda", dtype=torch.float64),
        }
    for reason, w in reasons.items():
        with pytest.raises(ValueError, match=f"'triton' cannot run here: .*{reason}"):
            causal_tssa(w, torch.ones(w.shape[2], device=w.device), backend="triton")


def test_bits_do_not_depend_on_the_number_of_threads():
    threads, w, dy = torch.get_num_threads(), torch.randn(1, 1500, 12, 64), torch.randn(1, 1500, 12, 64)
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            inputs = w.clone().requires_grad_(), torch.ones(12, requires_grad=True)
            y = causal_tssa(*inputs)[0]
            results.append([y, *torch.autograd.grad(y, inputs, dy)])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(x, other) for result in results[1:] for x, other in zip(result, results[0], strict=True))
