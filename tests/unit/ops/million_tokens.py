"""One forward and backward of 2^20 tokens, 4 heads of 64 channels, in float32, in a process of its own.

Prints beside=SHARE, the peak memory beyond w, y, dy and dw in units of w, and the errors of y and dw at the last 1,000
tokens against the formulas in float64.
"""

import re
from pathlib import Path

import torch

from tost_lm.ops import TssaState, causal_tssa

T, H, D = 1 << 20, 4, 64
LAST = 1000


def resident_bytes(key: str) -> int:
    found = re.search(rf"{key}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


def run(w: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    y, _ = causal_tssa(w, temp)
    y.backward(dy)
    return y


torch.manual_seed(0)
temp = torch.tensor([0.5, 1.0, 1.5, -1.0])
run(torch.randn(1, 64, H, D, requires_grad=True), torch.randn(1, 64, H, D))  # what the libraries take is there
w, dy = torch.randn(1, T, H, D), torch.randn(1, T, H, D)
w.requires_grad_()
Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
before = resident_bytes("VmRSS")
y = run(w, dy)
peak = resident_bytes("VmHWM")
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
print(f"beside={(peak - before) / (4 * w.numel()) - 2:.3f}")
