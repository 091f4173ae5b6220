"""The plugin of slot memory conforms, equals its recurrence, and is counted for few tokens."""

from types import ModuleType
from typing import Any

import pytest
import torch
from toy_mixer import rank_shard

from tost_lm.config import validate
from tost_lm.mixers import counted
from tost_lm.mixers.spec import Load
from tost_lm.model import ModelConfig
from tost_lm.testing.conformance import EQUALITIES, check, layer_adapter

WINDOW = EQUALITIES[7]
SMALL = {"plugin_settings": {"S": {"per_head": 1, "value_size": 3}}, "bias": True}


def config(**settings: Any) -> ModelConfig:
    return validate(ModelConfig, {"pattern": "S", "layers": 1, "heads": 2, "width": 8, "vocab_size": 8, **settings}, "")


@pytest.mark.usefixtures("slots")
@pytest.mark.parametrize("settings", [pytest.param({}, marks=pytest.mark.slow), SMALL], ids=str)
def test_slot_memory_conforms(settings: dict[str, Any]):
    report = check(layer_adapter("S", config(**settings), rank_shard), tokens=80)
    report.require()
    assert report.with_result("not offered") == [WINDOW]


def test_chunks_are_the_recurrence(slots: ModuleType):
    torch.manual_seed(0)
    B, T, H, S, V = 2, 2 * slots.CHUNK_TOKENS + 6, 2, 3, 4
    read, write = torch.randn(2, B, T, H, S, dtype=torch.float64).softmax(-1)
    value, log_decay_H = torch.randn(B, T, H, V, dtype=torch.float64), torch.tensor([-0.3, 0.0]).double()
    inputs = [x.requires_grad_() for x in (read, write, value, log_decay_H)]
    y_BTHV, sums_BHSE = slots.in_rows(*inputs, value.new_zeros(B, H, S, V + 1))
    M, N, outputs = value.new_zeros(B, H, S, V), value.new_zeros(B, H, S), []
    for t in range(T):
        decay_H11 = log_decay_H.exp()[:, None, None]
        M = decay_H11 * M + write[:, t, :, :, None] * value[:, t, :, None]
        N = decay_H11[..., 0] * N + write[:, t]
        outputs.append(torch.einsum("bhs,bhsv->bhv", read[:, t] / (N + 1e-8), M))
    expected = torch.stack(outputs, 1)
    sums = torch.cat([M, N[..., None]], -1)
    torch.testing.assert_close((y_BTHV, sums_BHSE), (expected, sums), rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(expected)
    gradients = [torch.autograd.grad((y * weights).sum(), inputs) for y in (y_BTHV, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("slots")
def test_a_loop_over_chunks_is_counted_for_few_tokens(monkeypatch: pytest.MonkeyPatch):
    (spec, shape), tokens = config().mixers[0], 448
    load = Load(shape, 4, True, tokens, tokens, tokens, 1, 1, True)
    few = spec.costs(load), spec.flops(shape, tokens)
    monkeypatch.setattr(counted, "LENGTHS", (tokens, tokens))
    whole = spec.costs(load), spec.flops(shape, tokens)
    assert few[0].launches == whole[0].launches > 1000
    assert few[0].stored == pytest.approx(whole[0].stored)
    assert few[1] == whole[1]
