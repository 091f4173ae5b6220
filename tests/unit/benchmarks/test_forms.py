"""The compared forms: one is the published operator; they are causal; their sums are those of a recurrence."""

import math

import pytest
import torch
from torch import Tensor

from benchmarks.forms import mixers
from benchmarks.forms.catalog import CATALOG
from benchmarks.forms.lm import FormLM
from benchmarks.forms.mixers import Form, Statistics
from benchmarks.forms.sums import decayed_read, decayed_sum, resetting
from tost_lm.model import ModelConfig
from tost_lm.model.positions import SequenceInfo
from tost_lm.model.slots import SlotMixer
from tost_lm.ops import naive

T, WIDTH = 23, 16
MAIN = Form(
    heads=2, channels=8, decay="learned", conv=True, centred=True, means=True, gate="channel", norm=True,
    groups=2, slots=3, values=4, slot_decay="learned",
)  # fmt: skip
FORMS = {
    "published": Form(share=True, positions=True),
    "input": Form(decay="input", conv=True, centred=True, norm=True),
    "main": MAIN,
    "skip": MAIN.model_copy(update={"skip": True, "slot_decay": "input"}),
    "slots alone": MAIN.model_copy(update={"channels": 0}),
    "softmax": Form(mixer="softmax", conv=True),
    "window": Form(mixer="softmax", conv=True, window=4),
    "linear": Form(mixer="linear", conv=True, decay="input", slots=3, values=4),
}


@pytest.fixture(autouse=True)
def _float64():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def drawn(form: Form) -> torch.nn.Module:
    """A mixer whose parameters are all random."""
    mixer = mixers.MIXERS[form.mixer](form, WIDTH, T)
    for parameter in mixer.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return mixer


@pytest.mark.parametrize("membership", ["energy-share", "energy-mean"])
def test_without_options_the_form_is_the_published_operator(membership: naive.Membership):
    mixer = drawn(Form(share=membership == "energy-share", positions=True))
    assert isinstance(mixer, Statistics)
    w_BTHD = torch.randn(2, T, 4, 5)
    bias_BTH = mixer.denom_bias.T.expand(2, T, 4)
    expected, _ = naive.causal_tssa(w_BTHD, mixer.temp, bias_BTH, membership, naive.TssaState.empty(2, 4, 5, w_BTHD))
    torch.testing.assert_close(mixer.statistics(w_BTHD, torch.zeros(1, 4, 1))[0], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_causal_and_does_not_depend_on_the_chunk(name: str, monkeypatch: pytest.MonkeyPatch):
    mixer, x_BTC = drawn(FORMS[name]), torch.randn(2, T, WIDTH)
    y_BTC = mixer(x_BTC)
    changed = x_BTC.clone()
    changed[:, 15:] = torch.randn_like(changed[:, 15:])
    torch.testing.assert_close(mixer(changed)[:, :15], y_BTC[:, :15], rtol=0, atol=1e-12)
    assert not torch.allclose(mixer(changed)[:, 15:], y_BTC[:, 15:])
    for chunk in (3, T):  # the second is one dense mask
        monkeypatch.setattr(mixers, "CHUNK", chunk)
        torch.testing.assert_close(mixer(x_BTC), y_BTC, rtol=1e-12, atol=1e-12)


def test_the_main_form_is_its_recurrence():
    mixer, x_BTC = drawn(MAIN), torch.randn(2, T, WIDTH)
    assert isinstance(mixer, Statistics)
    torch.testing.assert_close(mixer(x_BTC), recurrence(mixer, x_BTC), rtol=1e-12, atol=1e-12)


def recurrence(m: Statistics, x_BTC: Tensor) -> Tensor:
    """The main form token by token, from a state of constant size."""
    H, D, G, S, U = 2, 4, 2, 3, 4
    assert m.means_out is not None
    B = len(x_BTC)
    rho_H1, rho_G11 = m.decays(x_BTC).exp()[0], m.slots.decays(x_BTC).exp()[0][..., None]
    count, energy, second, first, mass = 0.0, 0.0, 0.0, 0.0, 0.0
    memory, written = torch.zeros(B, G, S, U), torch.zeros(B, G, S)
    before_w, before_key = [torch.zeros(B, H * D)] * 3, [torch.zeros(B, G * S)] * 3
    outputs = []
    for x_BC in x_BTC.unbind(1):
        before_w, before_key = [*before_w, m.in_proj(x_BC)], [*before_key, m.slots.key(x_BC)]
        w = torch.einsum("ct,tbc->bc", m.conv.get_parameter("weight"), torch.stack(before_w)).view(B, H, D)
        key = torch.einsum("ct,tbc->bc", m.slots.key_conv.weight, torch.stack(before_key))
        before_w, before_key = before_w[1:], before_key[1:]

        count, energy = rho_H1 * count + 1, rho_H1 * energy + w**2
        pi = (m.temp * ((count * w**2 / energy).mean(-1) + m.denom_bias)).softmax(-1)[..., None]
        second, first, mass = rho_H1 * second + pi * w**2, rho_H1 * first + pi * w, rho_H1 * mass + pi
        y = -pi * (w - m.get_parameter("centre")[:, None] * first / (mass + 1e-8)) / (1 + second / (mass + 1e-8))

        write = (m.slots.temp[0, :, None] * key.view(B, G, S)).softmax(-1)
        read = (m.slots.temp[1, :, None] * m.slots.query(x_BC).view(B, G, S)).softmax(-1)
        memory = rho_G11 * memory + write[..., None] * m.slots.value(x_BC).view(B, G, 1, U)
        written = rho_G11[..., 0] * written + write
        u = (read / (written + 1e-8))[..., None] * memory
        means = m.means_out((first / (mass + 1e-8))[:, None], x_BC[:, None])
        branches = [m.heads_out(y[:, None], x_BC[:, None]), means, m.slots_out(u.sum(-2)[:, None], x_BC[:, None])]
        outputs.append(m.out_proj(torch.cat(branches, -1)))
    return torch.cat(outputs, 1)


def test_sums_start_again_and_nothing_earlier_is_read():
    v_BHTE, log = torch.randn(2, 3, T, 4), -torch.rand(2, 3, T)
    expected = torch.cat([decayed_sum(v_BHTE[:, :, i : i + 8], log[:, :, i : i + 8], 8) for i in (0, 8, 16)], 2)
    torch.testing.assert_close(resetting(decayed_sum, v_BHTE, log=log, chunk=4, every=8), expected)
    q, k = torch.randn(2, 2, 3, T, 5)
    summed = decayed_sum((k[..., None] * v_BHTE[..., None, :]).flatten(-2), log, 4).unflatten(-1, (5, 4))
    torch.testing.assert_close(decayed_read(q, k, v_BHTE, log, 4), (q[..., None] * summed).sum(-2))


def test_no_decay_is_too_strong():
    log = torch.full((1, 1, 1), -1e4)
    v_BHTE = torch.randn(1, 1, T, 2)
    torch.testing.assert_close(decayed_sum(v_BHTE, log, 4), v_BHTE)
    (gradient,) = torch.autograd.grad(decayed_sum(v_BHTE, log.requires_grad_(), 4).sum(), log)
    assert math.isfinite(float(gradient))


@pytest.mark.parametrize("name", FORMS)
def test_forms_have_equally_many_parameters(name: str):
    sizes = [FormLM([form] * 4, 128, 1024, 512).parameter_count() for form in (FORMS["published"], FORMS[name])]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.005)


def test_the_slots_are_the_layer_of_the_product():
    form, C = CATALOG["slots"][0], 12
    torch.manual_seed(0)
    theirs = Statistics(form, C, T).double()
    ours = SlotMixer(ModelConfig(layers=1, heads=form.groups, width=C, pattern="S")).double()
    slots, out = theirs.slots, theirs.slots_out
    assert slots.decays.log_rate is not None
    assert out.gate is not None
    heads = lambda weight: weight.unflatten(0, (form.groups, -1))
    parts = [heads(layer.weight) for layer in (slots.key, slots.query, slots.value, out.gate)]
    with torch.no_grad():
        ours.in_proj.weight.copy_(torch.cat(parts, 1).flatten(0, 1))
        ours.out_proj.weight.copy_(theirs.out_proj.weight)
        ours.conv.copy_(heads(slots.key_conv.weight.normal_()))
        ours.log_rate.copy_(slots.decays.log_rate)
        ours.log_rate[-1] = -torch.inf  # here the last head never forgets
    assert ours.write_temp.tolist() == slots.temp[0].tolist()
    x_BTC = torch.randn(2, T, C).double()
    y_BTC, state = ours(x_BTC, None, SequenceInfo.of(x_BTC[..., 0], None, None))
    torch.testing.assert_close(y_BTC, theirs(x_BTC), rtol=1e-12, atol=1e-12)
    assert state is not None
    assert sum(x[0].numel() for x in state) == form.state_numbers(C) == 1024
