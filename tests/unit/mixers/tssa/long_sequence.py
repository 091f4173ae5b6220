"""One forward and backward of TOKENS tokens, 4 heads of 64 channels, in float32, in a process of its own.

    python -m tests.unit.mixers.tssa.long_sequence TOKENS

Compares y and dw at the last 1,000 tokens with the formulas. Prints the peak memory beyond w, y, dy and dw, in
units of w.
"""

import sys

import torch

from benchmarks.measure import peak_extra_bytes
from tests.unit.mixers.tssa.tssa_naive import causal_tssa_naive
from tost_lm.mixers.tssa.causal import causal_tssa
from tost_lm.mixers.tssa.statistics import TssaState
from tost_lm.testing import assert_as_accurate

T, H, D = int(sys.argv[1]), 4, 64
LAST = 1000


def run(w: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    y, _ = causal_tssa(w, temp)
    y.backward(dy)
    return y


torch.manual_seed(0)
temp = torch.tensor([0.5, 1.0, 1.5, -1.0])
run(torch.randn(1, 64, H, D, requires_grad=True), torch.randn(1, 64, H, D))  # memory that libraries allocate once
w, dy = torch.randn(1, T, H, D), torch.randn(1, T, H, D)
w.requires_grad_()
ys: list[torch.Tensor] = []
extra = peak_extra_bytes(lambda: ys.append(run(w, dy)), "cpu")
(y,) = ys
assert w.grad is not None

past = TssaState.empty(1, H, D, like=w.double())
with torch.no_grad():
    for tile in w[:, :-LAST].split(1 << 12, dim=1):
        _, past = causal_tssa_naive(tile.double(), temp.double(), initial_state=past)


def last_tokens(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """y and dw of the last tokens by the formulas."""
    w_end = w[:, -LAST:].detach().to(dtype).requires_grad_()
    start = TssaState(*(x.to(dtype) for x in past))
    y_end, _ = causal_tssa_naive(w_end, temp.to(dtype), initial_state=start)
    return y_end.detach(), torch.autograd.grad(y_end, w_end, dy[:, -LAST:].to(dtype))[0]


ours = (y[:, -LAST:].detach(), w.grad[:, -LAST:])
for name, *results in zip(("y", "dw"), ours, last_tokens(torch.float32), last_tokens(torch.float64), strict=True):
    assert_as_accurate(*results, what=name)
print(f"{extra / (4 * w.numel()) - 2:.3f}")
