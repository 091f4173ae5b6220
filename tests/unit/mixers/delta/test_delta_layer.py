"""The delta layer: the same tokens processed in any way, initial values, compiled shapes, and its settings."""

import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from tost_lm.errors import ConfigError
from tost_lm.mixers.delta import DeltaConfig, DeltaMixer, chunked
from tost_lm.mixers.delta.layer import DELTA_RULE, unit_length
from tost_lm.ops.initialization import initialize
from tost_lm.ops.layout import SequenceShard
from tost_lm.ops.positions import SequenceInfo
from tost_lm.testing.conformance import EQUALITIES, MixerAdapter, check

WIDTH = 12
SHAPE = DeltaConfig(key_heads=2, value_heads=4, key_size=5, value_size=3)


def call(
    mixer: DeltaMixer,
    x_BTC: Tensor,
    *,
    state: Any,
    cu_seqlens: Tensor | None,
    output_state: bool,
    shard: SequenceShard | None,
) -> tuple[Tensor, Any]:
    """The number of tokens so far is part of the state."""
    layer_state, positions = (None, None) if state is None else (state[0], state[1].tolist())
    documents = len(x_BTC) if cu_seqlens is None else len(cu_seqlens) - 1
    if positions is not None:
        positions += [0] * (documents - len(positions))
    info = SequenceInfo.of(x_BTC[..., 0], positions, cu_seqlens, shard, output_state)
    y_BTC, layer_state = mixer(x_BTC, layer_state, info)
    return y_BTC, (layer_state, torch.tensor(info.end_positions)) if output_state else None


@pytest.mark.parametrize("beta_to_two", [False, True])
def test_the_layer_conforms(beta_to_two: bool, monkeypatch: pytest.MonkeyPatch):
    """In tiles, token by token, packed, with states in and out, with a NaN, and against slopes; chunks of 4 tokens."""
    monkeypatch.setattr(chunked, "CHUNK_TOKENS", 4)
    config = SHAPE.model_copy(update={"beta_to_two": beta_to_two})
    report = check(MixerAdapter("delta", WIDTH, partial(DeltaMixer, WIDTH, config), call), tokens=20)
    report.require()
    assert len(report.with_result("holds")) == len(EQUALITIES) - 2, str(report)  # ranks and window are not offered


def test_initial_values_are_spread_over_the_published_ranges():
    mixer = DeltaMixer(WIDTH, DeltaConfig(key_heads=8, value_heads=64, key_size=16, value_size=2))
    rate_H, step_H = mixer.log_rate.exp(), softplus(mixer.step_bias)
    torch.testing.assert_close(rate_H.sort().values, (torch.arange(64) + 0.5) / 4)
    share_H = (step_H / 1e-3).log() / torch.tensor(100.0).log()
    assert 0 <= share_H.min() < 0.05
    assert 0.95 < share_H.max() <= 1
    assert torch.histc(share_H, 8, 0, 1).min() >= 6
    assert torch.corrcoef(torch.stack([rate_H, share_H]))[0, 1].abs() < 0.2
    before = mixer.conv.detach().clone()
    for values in (before, initialized(mixer).conv):
        assert values.std().item() == pytest.approx(12**-0.5, rel=0.1)
    assert not torch.equal(mixer.conv, before)


def initialized(mixer: DeltaMixer) -> DeltaMixer:
    initialize(nn.ModuleDict({"mixer": mixer}), layers=1, seed=0)
    return mixer


def test_queries_and_keys_are_normalized_in_float32():
    x = torch.randn(1, 7, 2, 128).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        unit = unit_length(x)
    assert unit.dtype == torch.float32
    torch.testing.assert_close(unit.double().norm(dim=-1), torch.ones(1, 7, 2, dtype=torch.float64), rtol=0, atol=1e-6)


@pytest.mark.parametrize("offsets", [None, [0, 2, 9]])
@pytest.mark.parametrize("wanted", ["True", "last", ""])
def test_a_compiled_graph_expects_the_shapes_that_come(offsets: list[int] | None, wanted: str):
    cu_seqlens = None if offsets is None else torch.tensor(offsets)
    info = SequenceInfo.of(torch.zeros(1, 9), None, cu_seqlens, None, {"True": True, "": False}.get(wanted, "last"))
    drawn = [torch.rand(1, 9, *shape) for shape in ((2, 5), (2, 5), (4, 3), (4,), (4,))]
    tensors = [*drawn[:3], -drawn[3], drawn[4], None, info.state_offsets]
    for ours, fake in zip(DELTA_RULE._run(info, tensors, wanted), DELTA_RULE._fake(tensors, wanted), strict=True):
        assert (ours.shape, ours.dtype) == (fake.shape, fake.dtype)


def test_a_sequence_shard_is_refused():
    info = SequenceInfo.of(torch.zeros(1, 4), None, None)
    object.__setattr__(info, "shard", object())
    with pytest.raises(ConfigError, match=r"do not support sequence ranks; set parallel\.sequence = 1"):
        DeltaMixer(WIDTH, SHAPE)(torch.zeros(1, 4, WIDTH), None, info)


def test_value_heads_are_a_multiple_of_key_heads():
    assert DeltaConfig(key_heads=3).heads == 3
    with pytest.raises(ValueError, match="value_heads 4 is not a multiple of key_heads 3; change one of them"):
        DeltaConfig(key_heads=3, value_heads=4)


def test_settings_need_no_torch():
    code = "import sys, tost_lm.mixers.delta as delta; delta.DeltaConfig(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
