"""Calls for the Triton backend, small enough for Triton's interpreter, and assertions that hold on any device."""

from dataclasses import replace

import torch
from agreement import TRITON, Call, Results, assert_accurate, draw_call, errors

from tost_lm.testing import assert_as_accurate


def with_bias_of_each_sequence(call: Call) -> Call:
    """The call with a bias [B, H, T] whose heads, not tokens, are contiguous in memory."""
    B, T, H, _ = call.w.shape
    return replace(call, bias=0.3 * torch.randn(B, T, H, generator=torch.Generator().manual_seed(0)).mT.double())


def with_small_first_tokens(call: Call, scale: float) -> Call:
    """The call with the first token of each document `scale` times as large, and no channel at the floor of S1."""
    assert call.cu_seqlens is not None
    first = call.cu_seqlens[:-1].long()
    w = call.w.clone()
    w[:, first] = scale * (w[:, first] + w[:, first].sign())
    return replace(call, w=w.float().double())


def with_value(call: Call, value: float) -> Call:
    """The call with some tokens and one channel set to ±`value`."""
    w, signed = call.w.clone(), value * call.w.sign()
    for places in (slice(0, 2), slice(20, 24)):
        w[:, places] = signed[:, places]
    w[..., 3] = signed[..., 3]
    return replace(call, w=w.float().double())


SHAPES = {
    "one token, one head": draw_call(0, (1,), 1, 16),
    "rows and a bias for each": with_bias_of_each_sequence(draw_call(1, (33, 33), 3, 16, packed=False)),
    "three chunks": draw_call(2, (65,), 2, 24, fresh=True),
    "documents": draw_call(3, (1, 35, 2, 1), 2, 40),
    "five heads": draw_call(4, (31, 1), 5, 16, fresh=True),
    "wide heads": draw_call(5, (32,), 2, 130),
    "full chunks": draw_call(12, (64, 32), 3, 16),
}
SMALL_FIRST_TOKENS = {
    "1e-3": with_small_first_tokens(draw_call(7, (34,), 2, 16, fresh=True), 1e-3),
    "1e-5": with_small_first_tokens(draw_call(8, (34, 3), 2, 16, fresh=True), 1e-5),
}
EXTREMES = {value: with_value(draw_call(9, (34,), 2, 16, fresh=True), value) for value in (0.0, 65504.0, 1e-20, 1e-40)}


def run(call: Call) -> Results:
    """Results of the backend, on the device of the call."""
    return call.run(TRITON)


def assert_is_the_formulas(call: Call, device: str) -> None:
    assert_accurate(call.on(device), run)


def assert_is_stable(call: Call, device: str) -> None:
    """For calls where the formulas in float32 cancel: the reference is the exact result of rounded inputs."""
    call = call.on(device)
    assert_accurate(call, run, reference=call.rounded().run("naive"))


def assert_costs_one_rounding(call: Call, dtype: torch.dtype, device: str, limit: float = 1.5) -> None:
    """The errors of y and dw, by norm, are at most `limit` times those of the exact values rounded to `dtype`."""
    low = call.on(device).to(dtype)
    truth, ours = low.to(torch.float64).run("naive"), run(low)
    for name in ("y", "dw"):
        error, rounding = (x.double() - truth[name] for x in (ours[name], truth[name].to(dtype)))
        assert ours[name].dtype == dtype
        assert error.norm() <= limit * rounding.norm(), (name, error.norm(), rounding.norm())


def assert_largest_float16_is_no_overflow(device: str) -> None:
    call = with_value(draw_call(11, (34,), 2, 16, fresh=True), 65504.0).on(device).to(torch.float16)
    wide = call.to(torch.float64)
    found, reference, truth = run(call), wide.to(torch.float32).run("naive"), wide.run("naive")
    assert errors(found, truth)["y"] < 2**-10
    for name in ("energy", "weighted_energy"):
        assert_as_accurate(found[name], reference[name], truth[name], name)


def assert_nan_stays(device: str) -> None:
    """A NaN reaches later tokens of its document, no earlier token and no other document."""
    call = draw_call(10, (3, 40, 3), 2, 16, fresh=True).on(device).to(torch.float32)
    clean = run(call)
    call.w[0, 37, 1, 2] = float("nan")
    spoiled = run(call)
    assert spoiled["y"][:, 37:43].isnan().all()
    for name, before in (("y", 37), ("dw", 3)):
        for tokens in (slice(0, before), slice(43, None)):
            assert torch.equal(spoiled[name][:, tokens], clean[name][:, tokens])
    for name in ("energy", "weighted_energy", "mass", "d_energy", "d_weighted_energy", "d_mass"):
        assert torch.equal(spoiled[name][[0, 2]], clean[name][[0, 2]])
