"""One forward and backward of TOKENS tokens, 4 heads of 64 channels, in float32, in a process of its own.

    python -m tests.unit.ops.long_sequence TOKENS

Prints beside=SHARE, the peak memory beyond w, y, dy and dw in units of w, and the errors of y and dw at the last 1,000
tokens against the formulas in float64.
"""

import sys

import torch

from benchmarks.measure import peak_extra_bytes
from tost_lm.ops import TssaState, causal_tssa

T, H, D = int(sys.argv[1]), 4, 64
LAST = 1000


def run(w: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    y, _ = causal_tssa(w, temp)
    y.backward(dy)
    return y


torch.manual_seed(0)
temp = torch.tensor([0.5, 1.0, 1.5, -1.0])
run(torch.randn(1, 64, H, D, requires_grad=True), torch.randn(1, 64, H, D))  # what the libraries take is there
w, dy = torch.randn(1, T, H, D), torch.randn(1, T, H, D)
w.requires_grad_()
ys: list[torch.Tensor] = []
extra = peak_extra_bytes(lambda: ys.append(run(w, dy)), "cpu")
(y,) = ys
assert w.grad is not None

state = TssaState.empty(1, H, D, like=w.double())
with torch.no_grad():
    for tile in w[:, :-LAST].split(1 << 12, dim=1):
        _, state = causal_tssa(
            tile.double(), temp.double(), initial_state=state, output_final_state=True, backend="naive"
        )
        assert state is not None
w_end = w[:, -LAST:].detach().double().requires_grad_()
y_end, _ = causal_tssa(w_end, temp.double(), initial_state=state, backend="naive")
(dw_end,) = torch.autograd.grad(y_end, w_end, dy[:, -LAST:].double())
for name, ours, truth in (("y", y[:, -LAST:], y_end), ("dw", w.grad[:, -LAST:], dw_end)):
    print(f"{name}_error={((ours - truth).abs().max() / truth.abs().max()).item():.2e}")
print(f"beside={extra / (4 * w.numel()) - 2:.3f}")
