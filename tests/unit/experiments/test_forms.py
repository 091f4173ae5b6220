"""The compared forms are their recurrences, causal, and of equal size; slots are the plugin."""

import json
import math
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments.forms import mixers, recurrences
from experiments.forms.catalog import CATALOG, CONSTANT, forms_of
from experiments.forms.lm import FormLM
from experiments.forms.mixers import MIXERS, Form, Mixer, Slots
from experiments.forms.sweep import SEEDS, Result, best_rival, rates_to_screen, startable
from experiments.forms.tables import tables
from experiments.training import train
from tost_lm.model import ModelConfig
from tost_lm.ops.positions import SequenceInfo
from tost_lm.optim.settings import OptimConfig

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


def test_no_decay_is_too_strong():
    log = torch.full((1, 1, T), -1e4, requires_grad=True)
    k = torch.randn(1, 1, T, 2)
    torch.testing.assert_close(recurrences.decayed_sum(k, log, 4), k)
    (gradient,) = torch.autograd.grad(recurrences.decayed_sum(k, log, 4).sum(), log)
    assert math.isfinite(float(gradient.sum()))


def test_overwriting_slots_keep_what_is_not_written():
    mixer = drawn(SMALL["overwriting"])
    q, k, v, x_BTC = torch.randn(B, H, T, S), torch.randn(B, H, T, S), torch.randn(B, H, T, V), torch.randn(B, T, WIDTH)
    write, read = mixers.memberships(mixer.get_parameter("temp"), k, q)
    write = mixer.get_submodule("strength")(x_BTC).sigmoid().mT[..., None] * write
    memory, outputs = torch.zeros(B, H, S, V), []
    for t in range(T):
        memory = (1 - write[:, :, t, :, None]) * memory + write[:, :, t, :, None] * v[:, :, t, None]
        outputs.append((read[:, :, t, :, None] * memory).sum(-2))
    torch.testing.assert_close(mixer.mix(q, k, v, x_BTC), torch.stack(outputs, 2), rtol=1e-12, atol=1e-12)


def test_a_window_of_slots_reads_its_last_tokens_alone():
    mixer, x_BTC = drawn(SMALL["window of slots"]), torch.randn(B, T, WIDTH)
    short = Slots(SMALL["slots"], WIDTH)
    short.load_state_dict(mixer.state_dict())
    q, k, v = torch.randn(B, H, T, S), torch.randn(B, H, T, S), torch.randn(B, H, T, V)
    alone = short.mix(q[:, :, 10:15], k[:, :, 10:15], v[:, :, 10:15], x_BTC[:, 10:15])
    torch.testing.assert_close(mixer.mix(q, k, v, x_BTC)[:, :, 14], alone[:, :, -1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CATALOG)
def test_models_have_equally_many_parameters_and_small_states(name: str):
    sizes = [FormLM(forms_of(each, 4), 128, 1024).parameter_count() for each in ("slots", name)]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.005)
    if name in CONSTANT:
        assert all(0 < (form.state_numbers or 0) <= 8 * 128 for form in forms_of(name, 4))
        assert forms_of(name, 1, 4)[0].state_numbers == 4 * (forms_of(name, 1)[0].state_numbers or 0)


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


def test_a_stopped_training_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = torch.randint(50, (8, 2, 9), generator=torch.Generator().manual_seed(0))
    optim = OptimConfig(lr=1e-2, min_lr=1e-3)

    def trained(until: int, name: str) -> tuple[dict[str, Any], FormLM]:
        torch.manual_seed(0)
        model = FormLM([SMALL["delta"]], WIDTH, 50)

        def loss_of(step: int) -> Tensor:
            if step == until:
                raise KeyboardInterrupt
            loss = model(rows[step, :, :-1], rows[step, :, 1:]).loss
            assert loss is not None
            return loss

        return train(model, optim, 8, loss_of, tmp_path / name), model

    whole, expected = trained(9, "whole")
    monkeypatch.setattr("experiments.training.SAVE_EVERY_S", -1.0)
    with pytest.raises(KeyboardInterrupt):
        trained(5, "stopped")
    again, model = trained(9, "stopped")
    assert again["training_losses"] == whole["training_losses"]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    assert not list(tmp_path.iterdir())


def result(run: dict[str, Any]) -> Result:
    """A result whose loss is best at 8e-3 for slots and at 4e-3 for all others, and that depends on the name."""
    best = 8e-3 if run["name"] == "slots" else 4e-3
    loss = 3 + abs(math.log2(run["lr"] / best)) / 10 + len(run["name"]) / 100
    by_length = {"accuracy_by_length": {"1": 1.0, "4": 0.5}} if run["stage"] == "hybrids-recall" else {}
    found = {
        **by_length,
        "loss": loss,
        "accuracy": 0.9,
        "steps": 100,
        "seconds": 1.0,
        "context_gain": 0.0,
        "copy": 0.0,
        "far": 0.0,
    }
    sizes = {"state_numbers": [1, None], "tap_numbers": [1], "mlp_channels": 1, "parameters": 1}
    return json.loads(json.dumps({"run": run, **found, **by_length, **sizes}))


def test_the_sweep_ends_and_later_stages_use_the_rates_that_earlier_ones_found():
    results: list[Result] = []
    while run := next(startable(results), None):
        results.append(result(run))
    assert rates_to_screen(results, "slots") == [2e-3, 4e-3, 8e-3, 1.6e-2]
    stages = [r["run"]["stage"] for r in results]
    assert {stage: stages.count(stage) for stage in dict.fromkeys(stages)} == {
        "screen": 22, "finals": 21, "mqar-rates": 12, "mqar": 18, "hybrids": 9, "hybrids-recall": 12, "long": 3,
        "states": 4,
    }  # fmt: skip
    finals = [r["run"] for r in results if r["run"]["stage"] == "finals"]
    assert {run["lr"] for run in finals if run["name"] in ("slots", "slots-window")} == {8e-3}
    assert {run["lr"] for run in finals if run["name"] == "delta"} == {4e-3}
    assert [run["name"] for run in finals].count("hgrn2") == len(SEEDS)  # the better of two
    assert best_rival(results) == "delta"
    text = re.sub(" +", " ", tables(results))
    assert "| slots | 0.002: 3.250, 0.004: 3.150, 0.008: 3.050, 0.016: 3.150 | 0.008 |" in text
    assert "The runs took 0.0 hours of one core, of a budget of 14, without those of hybrids." in text
    assert "| full-hybrid | 3 | 3.110 | +0.050 ± 0.000 | – | 100.0% (100.0% to 100.0%) | 50.0%" in text
