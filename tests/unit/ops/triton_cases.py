"""Calls for the Triton backend, small enough for Triton's interpreter, and what must hold for them on any device."""

from dataclasses import replace

import torch
from agreement import NAMES, Call, draw_call, errors

from tost_lm.ops import TssaState


def with_bias_of_each_sequence(call: Call) -> Call:
    """Bias [B, H, T] with heads, not tokens, side by side in memory."""
    B, T, H, _ = call.w.shape
    return replace(call, bias=0.3 * torch.randn(B, T, H, generator=torch.Generator().manual_seed(0)).mT.double())


def with_small_first_tokens(call: Call, scale: float) -> Call:
    """The first token of each document is `scale` times as large, and in no channel so small that S1 is floored."""
    assert call.cu_seqlens is not None
    first = call.cu_seqlens[:-1].long()
    w = call.w.clone()
    w[:, first] = scale * (w[:, first] + w[:, first].sign())
    return replace(call, w=w.float().double())


def with_value(call: Call, value: float) -> Call:
    """Tokens of ±`value` first and amid, and a channel of nothing else."""
    w, signed = call.w.clone(), value * call.w.sign()
    for places in (slice(0, 2), slice(20, 24)):
        w[:, places] = signed[:, places]
    w[..., 3] = signed[..., 3]
    return replace(call, w=w.float().double())


SHAPES = {
    "one token, one head": draw_call(0, (1,), 1, 16),
    "rows and a bias for each": with_bias_of_each_sequence(draw_call(1, (33, 33), 3, 16, packed=False)),
    "three chunks": draw_call(2, (65,), 2, 24, "energy-mean", fresh=True),
    "documents": draw_call(3, (1, 35, 2, 1), 2, 40, "energy-mean"),
    "five heads": draw_call(4, (31, 1), 5, 16, fresh=True),
    "wide heads": draw_call(5, (32,), 2, 130),
    "uniform": draw_call(6, (3, 40), 3, 16, "uniform"),
}
SMALL_FIRST_TOKENS = {
    "1e-3": with_small_first_tokens(draw_call(7, (34,), 2, 16, "energy-mean", fresh=True), 1e-3),
    "1e-5": with_small_first_tokens(draw_call(8, (34, 3), 2, 16, fresh=True), 1e-5),
}
EXTREMES = {value: with_value(draw_call(9, (34,), 2, 16, fresh=True), value) for value in (0.0, 65504.0, 1e-20, 1e-40)}


def run(call: Call, device: str) -> dict[str, torch.Tensor]:
    """What the backend makes of the call on `device`, back on the host."""
    state = TssaState(*(x.to(device) for x in call.state))
    offsets = None if call.cu_seqlens is None else call.cu_seqlens.to(device)
    w, temp, bias = (x.to(device) for x in (call.w, call.temp, call.bias))
    there = Call(call.membership, w, temp, bias, state, offsets, tuple(x.to(device) for x in call.d_outputs))
    return {name: x.cpu() for name, x in there.run("triton").items()}


def assert_is_the_formulas(call: Call, device: str) -> None:
    """In float32: outputs, state and all gradients within 1e-5 of the largest value in float64."""
    # Where nothing came before, nobody asks for the gradient of that, and with S1 near 0 it has few digits to compare.
    names = NAMES if call.state.mass.any() else NAMES[:-3]
    found = errors(run(call.to(torch.float32), device), call.run("naive"))
    for name in names:
        assert found[name] <= 1e-5, (name, found[name])


def assert_costs_one_rounding(call: Call, dtype: torch.dtype, device: str, limit: float = 1.5) -> None:
    """y and dw are off, by norm, by at most `limit` times what rounding the exact ones to `dtype` makes."""
    low = call.to(dtype)
    truth, ours = low.to(torch.float64).run("naive"), run(low, device)
    for name in ("y", "dw"):
        error, rounding = (x.double() - truth[name] for x in (ours[name], truth[name].to(dtype)))
        assert ours[name].dtype == dtype
        assert error.norm() <= limit * rounding.norm(), (name, error.norm(), rounding.norm())


def assert_largest_float16_is_no_overflow(device: str) -> None:
    call = with_value(draw_call(11, (34,), 2, 16, fresh=True), 65504.0).to(torch.float16)
    found = errors(run(call, device), call.to(torch.float64).run("naive"))
    assert found["y"] < 2**-10
    assert found["energy"] < 1e-6
    assert found["weighted_energy"] < 1e-6


def assert_nan_stays(device: str) -> None:
    """A NaN reaches later tokens of its document, nothing earlier and nothing in other documents."""
    call = draw_call(10, (3, 40, 3), 2, 16, fresh=True).to(torch.float32)
    clean = run(call, device)
    call.w[0, 37, 1, 2] = float("nan")
    poisoned = run(call, device)
    assert poisoned["y"][:, 37:43].isnan().all()
    for name, before in (("y", 37), ("dw", 3)):
        for part in (slice(0, before), slice(43, None)):
            assert torch.equal(poisoned[name][:, part], clean[name][:, part])
    for name in ("energy", "weighted_energy", "mass", "d_energy", "d_weighted_energy", "d_mass"):
        assert torch.equal(poisoned[name][[0, 2]], clean[name][[0, 2]])
