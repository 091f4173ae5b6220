"""Random calls of the operator, and how far a backend is from the formulas in float64: outputs, state and gradients."""

import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import get_args

import torch
from hypothesis import strategies as st
from torch import Tensor

from tost_lm.ops import Membership, TssaState, causal_tssa
from tost_lm.ops.causal import Backend

NAMES = ("y", "energy", "weighted_energy", "mass", "dw", "d_temp", "d_bias", "d_energy", "d_weighted_energy", "d_mass")


@dataclass(frozen=True)
class Call:
    """Inputs of one call and the gradients that come back into it, in float64 unless `to` made them another dtype."""

    membership: Membership
    w: Tensor
    temp: Tensor
    bias: Tensor
    state: TssaState
    cu_seqlens: Tensor | None
    d_outputs: tuple[Tensor, ...]

    def to(self, dtype: torch.dtype) -> "Call":
        """w and its gradient in `dtype`; everything else at least in float32."""
        wide = torch.promote_types(dtype, torch.float32)
        energy, weighted, mass = (x.to(wide) for x in self.state[:3])
        state = TssaState(energy, weighted, mass, self.state.count)
        dy, *rest = self.d_outputs
        return replace(
            self, w=self.w.to(dtype), temp=self.temp.to(wide), bias=self.bias.to(wide), state=state,
            d_outputs=(dy.to(dtype), *(x.to(wide) for x in rest)),
        )  # fmt: skip

    def run(self, backend: Backend | None) -> dict[str, Tensor]:
        """Outputs, final state and all gradients by name."""
        leaves = [x.detach().requires_grad_() for x in (self.w, self.temp, self.bias, *self.state[:3])]
        w, temp, bias, energy, weighted, mass = leaves
        state = TssaState(energy, weighted, mass, self.state.count)
        y, final = causal_tssa(
            w, temp, bias, membership=self.membership, initial_state=state, output_final_state=True,
            cu_seqlens=self.cu_seqlens, backend=backend,
        )  # fmt: skip
        assert final is not None
        outputs = (y, *final[:3])
        gradients = torch.autograd.grad(outputs, leaves, self.d_outputs, materialize_grads=True)
        return {name: x.detach() for name, x in zip(NAMES, (*outputs, *gradients), strict=True)}


def draw_call(
    seed: int,
    lengths: tuple[int, ...],
    H: int,
    D: int,
    membership: Membership = "energy-share",
    *,
    packed: bool = True,
    fresh: bool = False,
) -> Call:
    """Documents of these lengths: packed into one row, or as rows of equal length. Drawn in float32, so that float32
    sees the same numbers. `fresh`: nothing came before them."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator).double()
    N = len(lengths)
    B, T = (1, sum(lengths)) if packed else (N, lengths[0])
    state = TssaState(draw(N, H, D) ** 2, draw(N, H, D) ** 2, draw(N, H) ** 2, torch.arange(N) * 3)
    if fresh:
        state = TssaState.empty(N, H, D, like=state.energy)
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    d_outputs = (draw(B, T, H, D), draw(N, H, D), draw(N, H, D), draw(N, H))
    w, temp, bias = draw(B, T, H, D), 1 + 0.5 * draw(H), 0.3 * draw(H, T)
    return Call(membership, w, temp, bias, state, offsets if packed else None, d_outputs)


@st.composite
def calls(draw: st.DrawFn, longest: int = 80) -> Call:
    """T = 1, odd T, documents shorter and longer than a chunk of 32 tokens, one-token documents, odd H and D."""
    lengths = draw(st.lists(st.sampled_from([1, 1, 2, 5, 16, 31, 32, 33, 48, 65, longest]), min_size=1, max_size=6))
    packed = draw(st.booleans())
    if not packed:
        lengths = lengths[:1] * min(len(lengths), 3)
    membership = draw(st.sampled_from(get_args(Membership)))
    H, D = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    return draw_call(
        draw(st.integers(0, 999)), tuple(lengths), H, D, membership, packed=packed, fresh=draw(st.booleans())
    )


def errors(ours: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """Largest difference by name, relative to the largest value of the truth; infinite where there is a NaN."""
    return {
        name: ((ours[name].double() - x.double()).abs().max() / x.abs().max().clamp_min(1e-30)).nan_to_num(inf).item()
        for name, x in truth.items()
    }


def documents(call: Call) -> list[slice]:
    assert call.cu_seqlens is not None
    return [slice(start, end) for start, end in pairwise(call.cu_seqlens.tolist())]


def assert_long_sequence_is_right(tokens: int) -> None:
    """Forward and backward take under a quarter of w beside w, y, dy and dw, and the last 1,000 tokens are right."""
    command = [sys.executable, "-m", "tests.unit.ops.long_sequence", str(tokens)]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures = {name: float(figure) for name, figure in (pair.split("=") for pair in done.stdout.split())}
    assert figures["beside"] < 0.25, figures
    assert figures["y_error"] < 1e-5, figures
    assert figures["dw_error"] < 1e-5, figures
