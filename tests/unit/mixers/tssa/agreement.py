"""Random calls of the operator, and their outputs, final state and gradients by every backend."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import inf
from pathlib import Path

import torch
from torch import Tensor
from tssa_naive import causal_tssa_naive

from tost_lm.mixers.layer import HeadSoftmax
from tost_lm.mixers.tssa.causal import BACKENDS, causal_tssa
from tost_lm.mixers.tssa.statistics import TssaState
from tost_lm.ops.backends import Backend
from tost_lm.testing import assert_as_accurate

TRITON = "triton" if torch.cuda.is_available() else "interpreter"
"""The backend of the Triton kernels; without a GPU, Triton's interpreter runs them."""
if TRITON == "interpreter":
    BACKENDS.append(Backend(TRITON, None, BACKENDS[0].code))  # the last one is never the default
NAMES = ("y", "energy", "weighted_energy", "mass", "dw", "d_temp", "d_bias", "d_energy", "d_weighted_energy", "d_mass")
Results = dict[str, Tensor]
"""Outputs, final state and gradients, by NAMES."""


@dataclass(frozen=True)
class Call:
    """The inputs of one call and the gradients of its outputs; float64 unless `to` changed the dtype."""

    w: Tensor
    temp: Tensor
    bias: Tensor
    state: TssaState
    cu_seqlens: Tensor | None
    d_outputs: tuple[Tensor, ...]

    def to(self, dtype: torch.dtype) -> "Call":
        """The call with w and its gradient in `dtype`, everything else at least in float32."""
        wide = torch.promote_types(dtype, torch.float32)
        state = TssaState(*(x.to(wide) for x in self.state))
        dy, *rest = self.d_outputs
        return replace(
            self, w=self.w.to(dtype), temp=self.temp.to(wide), bias=self.bias.to(wide), state=state,
            d_outputs=(dy.to(dtype), *(x.to(wide) for x in rest)),
        )  # fmt: skip

    def on(self, device: str) -> "Call":
        """The call with every tensor on `device`."""
        return replace(
            self, w=self.w.to(device), temp=self.temp.to(device), bias=self.bias.to(device),
            state=TssaState(*(x.to(device) for x in self.state)),
            cu_seqlens=None if self.cu_seqlens is None else self.cu_seqlens.to(device),
            d_outputs=tuple(x.to(device) for x in self.d_outputs),
        )  # fmt: skip

    def rounded(self) -> "Call":
        """The call with a relative error of at most 4 ε of float32, a few roundings, in every number.

        Its exact results show how accurate a stable float32 computation can be.
        """
        generator = torch.Generator().manual_seed(0)
        spread = 4 * torch.finfo(torch.float32).eps
        noise = lambda x: spread * (2 * torch.rand(x.shape, generator=generator).double() - 1).to(x.device)
        w, temp, bias, *state = (x * (1 + noise(x)) for x in (self.w, self.temp, self.bias, *self.state))
        return replace(
            self, w=w, temp=temp, bias=bias, state=TssaState(*state),
            d_outputs=tuple(x * (1 + noise(x)) for x in self.d_outputs),
        )  # fmt: skip

    def run(self, backend: str | None, heads: HeadSoftmax | None = None) -> Results:
        """By a backend, None: the default one, with the softmax of the caller if given; or `naive`, the formulas."""
        ours = partial(causal_tssa, output_final_state=True, backend=backend, heads=heads)
        rule = causal_tssa_naive if backend == "naive" else ours
        leaves = [x.detach().requires_grad_() for x in (self.w, self.temp, self.bias, *self.state)]
        w, temp, bias, *state = leaves
        y, final = rule(w, temp, bias, initial_state=TssaState(*state), cu_seqlens=self.cu_seqlens)
        assert final is not None
        outputs = (y, *final)
        gradients = torch.autograd.grad(outputs, leaves, self.d_outputs, materialize_grads=True)
        return {name: x.detach() for name, x in zip(NAMES, (*outputs, *gradients), strict=True)}


def draw_call(seed: int, lengths: tuple[int, ...], H: int, D: int, *, packed: bool = True, fresh: bool = False) -> Call:
    """Documents of these lengths, packed into one row or as rows of equal length.

    Every number is exact in float32. `fresh`: the initial state is empty.
    """
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator).double()
    N = len(lengths)
    B, T = (1, sum(lengths)) if packed else (N, lengths[0])
    state = TssaState(draw(N, H, D) ** 2, draw(N, H, D) ** 2, draw(N, H) ** 2)
    if fresh:
        state = TssaState.empty(N, H, D, like=state.energy)
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    d_outputs = (draw(B, T, H, D), draw(N, H, D), draw(N, H, D), draw(N, H))
    w, temp, bias = draw(B, T, H, D), 1 + 0.5 * draw(H), 0.3 * draw(H, T)
    return Call(w, temp, bias, state, offsets if packed else None, d_outputs)


def errors(ours: Results, truth: Results) -> dict[str, float]:
    """The largest difference by name, relative to the largest value of the truth; infinite where there is a NaN."""
    return {
        name: ((ours[name].double() - x.double()).abs().max() / x.abs().max().clamp_min(1e-30)).nan_to_num(inf).item()
        for name, x in truth.items()
    }


def assert_accurate(call: Call, run: Callable[[Call], Results], reference: Results | None = None) -> None:
    """In float32, `run` is as accurate as `reference`, by default the formulas in float32.

    Gradients of an empty initial state are not compared: they are ratios of rounding errors.
    """
    narrow = call.to(torch.float32)
    ours, theirs, truth = run(narrow), reference or narrow.run("naive"), call.run("naive")
    for name in NAMES if call.state.mass.any() else NAMES[:-3]:
        assert_as_accurate(ours[name], theirs[name], truth[name], name)


def documents(call: Call) -> list[slice]:
    assert call.cu_seqlens is not None
    return [slice(start, end) for start, end in pairwise(call.cu_seqlens.tolist())]


def assert_long_sequence_is_right(tokens: int) -> None:
    """Forward and backward need under a quarter of w beside w, y, dy and dw, and the last 1,000 tokens are accurate."""
    command = [sys.executable, "-m", "tests.unit.mixers.tssa.long_sequence", str(tokens)]
    done = subprocess.run(command, cwd=Path(__file__).parents[4], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.25
