"""Values that break careless arithmetic: what the formulas give in float64, the chunked backend gives in float32."""

from typing import get_args

import pytest
import torch
from agreement import draw_call, errors

from tost_lm.ops import Membership, causal_tssa, chunked
from tost_lm.ops.causal import Backend

FORWARD = ("y", "energy", "weighted_energy", "mass")


@pytest.fixture(autouse=True)
def chunks_of_32_tokens(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chunked, "CPU_CHUNK_ELEMENTS", 1)


@pytest.mark.parametrize("membership", get_args(Membership))
@pytest.mark.parametrize("value", [0.0, 65504.0, -65504.0, 1e-20, 1e-40], ids=str)
@pytest.mark.parametrize("where", [slice(None), slice(0, 3), slice(40, 41)], ids=["all", "first", "one"])
def test_extreme_values_are_what_the_formulas_say(value: float, where: slice, membership: Membership):
    call = draw_call(0, (50, 20), 3, 4, membership, fresh=True)
    call.w[:, where] = value
    call.w.copy_(call.w.float())
    found = errors(call.to(torch.float32).run("chunked"), call.run("naive"))
    assert max(found[name] for name in (*FORWARD, "dw", "d_temp", "d_bias")) < 1e-5, found


@pytest.mark.parametrize("temp", [50.0, -50.0])
def test_extreme_temperatures(temp: float):
    call = draw_call(1, (50, 20), 3, 4, fresh=True)
    call.temp[1] = temp
    found = errors(call.to(torch.float32).run("chunked"), call.run("naive"))
    # A score of 50·D has few digits left behind the point in float32, and memberships are exponentials of them.
    assert max(found[name] for name in (*FORWARD, "dw", "d_temp", "d_bias")) < 2e-5, found
    assert max(errors(call.run("chunked"), call.run("naive")).values()) < 1e-12


@pytest.mark.parametrize("value", [65504.0, 1e-7])
def test_the_ends_of_float16(value: float):
    call = draw_call(2, (50,), 3, 4, fresh=True)
    call.w[:, 5] = value
    half = call.to(torch.float16)
    truth = half.to(torch.float64).run("naive")
    assert errors(half.run("chunked"), truth)["y"] < 2**-10
    assert errors(half.run("chunked"), truth)["energy"] < 1e-6


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("backend", ["naive", "chunked"])
def test_a_poisoned_token_reaches_later_tokens_of_its_document_alone(backend: Backend, poison: float):
    call = draw_call(3, (40, 45, 30), 3, 4, fresh=True)
    clean = call.run(backend)
    call.w[0, 40 + 33, 1, 2] = poison
    poisoned = call.run(backend)
    before, inside, after = slice(0, 73), slice(73, 85), slice(85, 115)
    assert torch.equal(poisoned["y"][:, before], clean["y"][:, before])
    assert torch.equal(poisoned["y"][:, after], clean["y"][:, after])
    assert poisoned["y"][:, inside].isnan().all()
    for document, tokens in ((0, slice(0, 40)), (2, after)):
        assert torch.equal(poisoned["dw"][:, tokens], clean["dw"][:, tokens])
        assert torch.equal(poisoned["energy"][document], clean["energy"][document])


def test_a_poisoned_gradient_reaches_earlier_tokens_of_its_document_alone():
    call = draw_call(4, (40, 45), 3, 4, fresh=True)
    clean = call.run("chunked")
    call.d_outputs[0][0, 60] = float("nan")
    poisoned = call.run("chunked")
    assert torch.equal(poisoned["dw"][:, :40], clean["dw"][:, :40])
    assert torch.equal(poisoned["dw"][:, 61:], clean["dw"][:, 61:])
    assert poisoned["dw"][:, 40:61].isnan().any()


def test_channels_without_energy_get_no_gradient():
    w = torch.randn(1, 40, 2, 3)
    w[..., 1] = 0
    w.requires_grad_()
    y, _ = causal_tssa(w, torch.ones(2))
    (dw,) = torch.autograd.grad(y.square().sum(), w)
    assert dw[..., 1].abs().max() == 0
    assert dw[..., 0].abs().max() > 0
