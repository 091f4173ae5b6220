"""Calls of the bidirectional operator, and assertions that hold for any backend on any device."""

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from tost_lm.mixers.tssa import naive
from tost_lm.mixers.tssa.bidirectional import tssa
from tost_lm.testing import assert_as_accurate

NAMES = ("y", "dw", "d_temp")
Results = dict[str, Tensor]
"""The output and gradients, by NAMES."""


@dataclass(frozen=True)
class Call:
    """w [1, T, H, D] of packed documents, temp and dy; float64 unless `to` changed the dtype."""

    w: Tensor
    temp: Tensor
    dy: Tensor
    offsets: tuple[int, ...]

    def to(self, dtype: torch.dtype, device: str = "cpu") -> "Call":
        wide = torch.promote_types(dtype, torch.float32)
        return replace(self, w=self.w.to(device, dtype), temp=self.temp.to(device, wide), dy=self.dy.to(device, dtype))

    def run(self, backend: str | None = None) -> Results:
        return self._results(lambda w, temp: tssa(w, temp, cu_seqlens=torch.tensor(self.offsets), backend=backend))

    def reference(self) -> Results:
        """The formulas as written, in the dtype of the call."""
        ranges = list(pairwise(self.offsets))
        return self._results(lambda w, temp: torch.cat([naive.tssa(w[:, a:b], temp) for a, b in ranges], 1))

    def _results(self, function) -> Results:
        leaves = [x.detach().requires_grad_() for x in (self.w, self.temp)]
        y = function(*leaves)
        return dict(zip(NAMES, (y.detach(), *torch.autograd.grad(y, leaves, self.dy)), strict=True))


def draw(seed: int, lengths: tuple[int, ...], H: int, D: int) -> Call:
    """Every number is exact in float32."""
    generator = torch.Generator().manual_seed(seed)
    numbers = lambda *shape: torch.randn(*shape, generator=generator).double()
    T = sum(lengths)
    offsets = tuple(torch.tensor([0, *lengths]).cumsum(0).tolist())
    return Call(numbers(1, T, H, D), numbers(H) / 2, numbers(1, T, H, D), offsets)


def with_value(call: Call, value: float) -> Call:
    """The call with some tokens and one channel set to ±`value`."""
    w, signed = call.w.clone(), value * call.w.sign()
    for places in (slice(0, 2), slice(5, 7)):
        w[:, places] = signed[:, places]
    w[..., 3] = signed[..., 3]
    return replace(call, w=w.float().double())


CASES = {
    "documents of one to 33 tokens": draw(0, (1, 33, 2), 3, 20),
    "wide heads": draw(2, (3,), 2, 130),
    "full chunks": draw(3, (32, 32), 3, 16),
    "equal lengths": draw(4, (7, 7), 1, 5),
}
EXTREMES = {str(value): with_value(draw(5, (9, 3), 2, 16), value) for value in (0.0, 65504.0, 2e-13, 1e-20, 1e-40)}
"""Small enough for Triton's interpreter."""


def assert_is_the_formulas(call: Call, backend: str | None, device: str = "cpu") -> None:
    """In float32, as accurate as the formulas as written."""
    call = call.to(torch.float64, device)
    narrow, truth = call.to(torch.float32, device), call.reference()
    ours, theirs = narrow.run(backend), narrow.reference()
    for name in NAMES:
        assert_as_accurate(ours[name], theirs[name], truth[name], name)


def assert_costs_one_rounding(call: Call, dtype: torch.dtype, backend: str, device: str, limit: float = 1.5) -> None:
    """The errors of y and dw, by norm, are at most `limit` times those of the exact values rounded to `dtype`."""
    low = call.to(dtype, device)
    ours, truth = low.run(backend), low.to(torch.float64, device).reference()
    for name in ("y", "dw"):
        error, rounding = (x.double() - truth[name] for x in (ours[name], truth[name].to(dtype)))
        assert ours[name].dtype == dtype
        assert error.norm() <= limit * rounding.norm(), (name, error.norm(), rounding.norm())


def assert_single_tokens_have_the_output_of_one(backend: str, device: str) -> None:
    """A document of one token has all the energy of each channel, for any w: no gradient goes through its scores."""
    call = draw(7, (1,) * 4, 3, 16).to(torch.float32, device)
    leaf = call.temp.clone().requires_grad_()
    w = call.w.clone().requires_grad_()
    y = tssa(w, leaf, cu_seqlens=torch.tensor(call.offsets), backend=backend)
    pi = (16 * leaf.detach()).softmax(-1)[:, None].double()
    other = call.w.double().requires_grad_()
    expected = -pi * other / (1 + pi * other.square() / (pi + 1e-8))
    assert_as_accurate(y.detach(), expected.float().detach(), expected.detach(), "y")
    (dw,) = torch.autograd.grad(y, w, call.dy)
    (truth,) = torch.autograd.grad(expected, other, call.dy.double())
    # Each token for itself: where w is small, a gradient of the scores that is not quite 0 is divided by it.
    error = ((dw.double() - truth).abs() / truth.abs().amax((1, 2, 3), keepdim=True)).max()
    assert error < 16 * 2**-23, error


def assert_nan_stays(backend: str, device: str) -> None:
    """A NaN spoils its document and no other."""
    call = draw(8, (3, 9, 3), 2, 16).to(torch.float32, device)
    clean = call.run(backend)
    call.w[0, 7, 1, 2] = float("nan")
    spoiled = call.run(backend)
    assert spoiled["y"][:, 3:12, 1, 2].isnan().all()
    for name in ("y", "dw"):
        for tokens in (slice(0, 3), slice(12, None)):
            assert torch.equal(spoiled[name][:, tokens], clean[name][:, tokens])
