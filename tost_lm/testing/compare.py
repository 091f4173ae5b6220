"""Comparing tensors the way float results should be: by norm, not element by element."""

from torch import Tensor


def assert_close(actual: Tensor, expected: Tensor, relative: float, what: str = "tensor") -> None:
    """Assert that ‖actual − expected‖ ≤ relative · ‖expected‖, both in float64; `what` names it in the message."""
    assert actual.shape == expected.shape, f"{what}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    difference, norm = (actual.double() - expected.double()).norm().item(), expected.double().norm().item()
    # Written so that a NaN fails.
    assert difference <= relative * norm, f"{what}: off by {difference / max(norm, 1e-300):.2e} of its norm {norm:.3e}"
