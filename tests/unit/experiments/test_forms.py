"""The compared forms are their recurrences, causal, and of equal size; slots are the plugin."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from experiments.forms import recurrences
from experiments.forms.catalog import CATALOG
from experiments.forms.mixers import MIXERS, Form, Mixer, Slots
from tost_lm.model import ModelConfig
from tost_lm.ops.positions import SequenceInfo

B, H, T, S, V, WIDTH = 2, 2, 23, 3, 4, 16
SMALL = {name: Form(mixer=name, heads=H, keys=S, values=V) for name in MIXERS} | {  # pyright: ignore[reportArgumentType]
    "window of slots": Form(mixer="slots", heads=H, keys=S, values=V, window=5),
    "window of softmax": Form(mixer="softmax", heads=H, values=V, window=5),
}


@pytest.fixture(autouse=True)
def _float64():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def drawn(form: Form) -> Mixer:
    """A mixer whose parameters are all random."""
    mixer = MIXERS[form.mixer](form, WIDTH)
    for parameter in mixer.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return mixer


@pytest.mark.parametrize("name", SMALL)
def test_a_form_is_causal(name: str):
    mixer, x_BTC = drawn(SMALL[name]), torch.randn(B, T, WIDTH)
    y_BTC = mixer(x_BTC)
    changed = x_BTC.clone()
    changed[:, 15:] = torch.randn_like(changed[:, 15:])
    torch.testing.assert_close(mixer(changed)[:, :15], y_BTC[:, :15], rtol=0, atol=1e-12)
    assert not torch.allclose(mixer(changed)[:, 15:], y_BTC[:, 15:])


def recurrence(q: Tensor, k: Tensor, v: Tensor, log_BHTS: Tensor, beta_BHT: Tensor | None = None) -> Tensor:
    """M ← Diag(exp(log)) M + k vᵀ, with β the gated delta rule, token by token."""
    memory, outputs = torch.zeros(B, H, S, V), []
    for t in range(T):
        memory = log_BHTS[:, :, t, :, None].exp() * memory
        written, strength = v[:, :, t], 1.0
        if beta_BHT is not None:
            strength = beta_BHT[:, :, t, None, None]
            written = written - torch.einsum("bhs,bhsv->bhv", k[:, :, t], memory)
        memory = memory + strength * k[:, :, t, :, None] * written[:, :, None]
        outputs.append(torch.einsum("bhs,bhsv->bhv", q[:, :, t], memory))
    return torch.stack(outputs, 2)


@pytest.mark.parametrize("chunk", [1, 5, T, 64])
def test_chunks_are_the_recurrences(chunk: int):
    q, k, v = torch.randn(B, H, T, S), torch.randn(B, H, T, S), torch.randn(B, H, T, V)
    log, logs, beta = -torch.rand(B, H, T), -torch.rand(B, H, T, S), torch.rand(B, H, T)
    k, inputs = torch.nn.functional.normalize(k, dim=-1), [q, k, v, log, logs, beta]
    for x in inputs:
        x.requires_grad_()
    one_log = log[..., None].expand(B, H, T, S)
    pairs = [
        (recurrences.decayed_read(q, k, v, log, chunk), recurrence(q, k, v, one_log)),
        (recurrences.decayed_read_of_channels(q, k, v, logs, chunk), recurrence(q, k, v, logs)),
        (recurrences.gated_delta_read(q, k, v, log, beta, chunk), recurrence(q, k, v, one_log, beta)),
        (
            recurrences.decayed_sum(k, log, chunk),
            torch.stack([recurrence(torch.eye(S)[s].expand(B, H, T, S), k, torch.ones(B, H, T, V), one_log)[..., 0]
                         for s in range(S)], -1),
        ),
    ]  # fmt: skip
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        weights = torch.randn_like(expected)
        gradients = [torch.autograd.grad((y * weights).sum(), inputs, allow_unused=True, retain_graph=True)
                     for y in (found, expected)]  # fmt: skip
        for ours, theirs in zip(*gradients, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_the_slots_are_the_plugin(slots: ModuleType):
    form, C = CATALOG["slots"][0], 12
    torch.manual_seed(0)
    theirs = Slots(form, C).double()
    ours = slots.SlotMixer(ModelConfig(layers=1, heads=form.heads, width=C, pattern="S").shape_of("S")).double()
    heads = lambda weight: weight.unflatten(0, (form.heads, -1))
    layers = [*(theirs.projections[name] for name in "kqv"), theirs.gate]
    parts = [heads(layer.get_parameter("weight")) for layer in layers]
    with torch.no_grad():
        ours.in_proj.weight.copy_(torch.cat(parts, 1).flatten(0, 1))
        ours.out_proj.weight.copy_(theirs.out_proj.weight)
        ours.conv.copy_(heads(theirs.convs["k"].get_parameter("weight").normal_()))
        ours.log_rate.copy_(theirs.log_rate)
        ours.log_rate[-1] = -torch.inf  # here the last head never forgets
    assert ours.write_temp.tolist() == theirs.temp[: form.heads].tolist()
    x_BTC = torch.randn(2, T, C).double()
    y_BTC, state = ours(x_BTC, None, SequenceInfo.of(x_BTC[..., 0], None, None))
    torch.testing.assert_close(y_BTC, theirs(x_BTC), rtol=1e-12, atol=1e-12)
    assert state is not None
    assert sum(x[0].numel() for x in state) == (form.state_numbers or 0) + form.tap_numbers == 1024
