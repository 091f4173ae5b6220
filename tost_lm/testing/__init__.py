"""Helpers for tests of distributed and numeric code, shipped so that users can test theirs.

Tensors are compared as floating-point results: by norm, not element by element.
"""

from tost_lm.testing.ranks import Traffic, run_on_ranks

__all__ = ["FLOAT32_REORDERED", "Traffic", "assert_as_accurate", "assert_close", "run_on_ranks"]
import math

import torch
from torch import Tensor

FLOAT32_REORDERED = 2.0**-17
"""Relative difference allowed between two float32 results that add the same numbers in different orders.

Errors of random sign make a sum of n terms wrong by about √n·ε, with ε = 2⁻²³. Two such sums of n = 1,024 terms differ
by at most 2·√1024·ε = 2⁻¹⁷. The largest difference in this project's tests is 3e-7, with
ATEN_CPU_CAPABILITY default, avx2 and avx512 and with 1 and 2 threads.
"""


def assert_close(actual: Tensor, expected: Tensor, relative: float, what: str = "tensor") -> None:
    """Assert that ‖actual − expected‖ ≤ relative · ‖expected‖, both in float64; `what` names it in the message."""
    _require_shape(actual, expected, what)
    difference, norm = _distance(actual, expected), expected.double().norm().item()
    # Written so that a NaN fails.
    assert difference <= relative * norm, f"{what}: off by {difference / max(norm, 1e-300):.2e} of its norm {norm:.3e}"


def assert_as_accurate(ours: Tensor, theirs: Tensor, truth: Tensor, what: str = "tensor", factor: float = 32) -> None:
    """Assert that ‖ours − truth‖ ≤ factor · (‖theirs − truth‖ + ε · ‖truth‖), all in float64.

    The tolerance follows from the problem: the error of `theirs` shows how ill-conditioned it is, and ε is the machine
    epsilon of the dtype of `ours`. A NaN or an infinity on either side fails.

    Args:
        theirs: the result of a trusted method in the precision of `ours`.
        truth: the result in float64.
        what: names the tensor in the message.
        factor: how many times the error of `theirs` is allowed. The largest ratio in thousands of random comparisons
            of the operator and the model was 8, where the error of `theirs` was small by chance.
    """
    _require_shape(ours, truth, what)
    _require_shape(theirs, truth, what)
    error, reference = _distance(ours, truth), _distance(theirs, truth)
    bound = factor * (reference + torch.finfo(ours.dtype).eps * truth.double().norm().item())
    assert error <= bound < math.inf, f"{what}: error {error:.3e}, allowed {bound:.3e}; reference error {reference:.3e}"


def _require_shape(actual: Tensor, expected: Tensor, what: str) -> None:
    assert actual.shape == expected.shape, f"{what}: shape {list(actual.shape)}, expected {list(expected.shape)}"


def _distance(a: Tensor, b: Tensor) -> float:
    return (a.double() - b.double()).norm().item()
