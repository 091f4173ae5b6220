"""The delta layer: initial values, the layer of Kimi Linear, and its settings."""

from typing import Any

import pytest
import torch
from public_layers import run_in_torch
from torch import nn
from torch.nn.functional import softplus

from tost_lm.config import validate
from tost_lm.errors import ConfigError
from tost_lm.mixers.delta.layer import DeltaMixer, unit_length
from tost_lm.model import ModelConfig
from tost_lm.ops.initialization import initialize
from tost_lm.ops.positions import SequenceInfo

WIDTH = 12


def config_of(shape: dict[str, Any]) -> ModelConfig:
    tree = {"pattern": "D", "layers": 1, "heads": 2, "width": WIDTH, "vocab_size": 8, "delta": shape}
    return validate(ModelConfig, tree, "test")


def test_initial_values_are_spread_over_the_published_ranges():
    mixer = initialized(
        DeltaMixer(config_of({"qk_heads": 8, "value_heads": 64, "qk_size": 16, "value_size": 2}).shape_of("D"))
    )
    rate_H, step_H = mixer.log_rate.exp(), softplus(mixer.step_bias)
    torch.testing.assert_close(rate_H.sort().values, (torch.arange(64) + 0.5) / 4)
    share_H = (step_H / 1e-3).log() / torch.tensor(100.0).log()
    assert 0 <= share_H.min() < 0.05
    assert 0.95 < share_H.max() <= 1
    assert torch.histc(share_H, 8, 0, 1).min() >= 6
    assert torch.corrcoef(torch.stack([rate_H, share_H]))[0, 1].abs() < 0.2
    assert mixer.conv.std().item() == pytest.approx(12**-0.5, rel=0.1)


def test_a_decay_per_channel_is_the_layer_of_kimi_linear():
    """transformers' layer in float64, whose decays and gates are products of two smaller matrices."""
    modeling = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    settings = {"hidden_size": WIDTH, "linear_num_heads": 2, "linear_head_dim": 6, "num_hidden_layers": 1}
    torch.manual_seed(0)
    theirs = modeling.KimiLinearDeltaAttention(modeling.KimiLinearConfig(**settings), 0).double()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours = DeltaMixer(config_of({"decay_per_channel": True}).shape_of("D")).double()
    forget, x_BTC = theirs.forget_gate, torch.randn(2, 70, WIDTH, dtype=torch.float64)
    projections = theirs.q_proj, theirs.k_proj, theirs.v_proj
    by_head = [
        *(projection.weight.unflatten(0, (2, 6)) for projection in projections),
        (theirs.g_b_proj.weight @ theirs.g_a_proj.weight).unflatten(0, (2, 6)),
        theirs.b_proj.weight[:, None],
        (forget.f_b_proj.weight @ forget.f_a_proj.weight).unflatten(0, (2, 6)),
    ]
    ours.load_state_dict({
        "in_proj.weight": torch.cat(by_head, 1).flatten(0, 1),
        "out_proj.weight": theirs.o_proj.weight,
        "conv": theirs.conv1d.weight.view(3, 2, 6, 4).transpose(0, 1).reshape(36, 4),
        "log_rate": forget.A_log.flatten(),
        "step_bias": forget.dt_bias,
        "norm": theirs.o_norm.weight,
    })  # fmt: skip
    info = SequenceInfo.of(torch.zeros(2, 70), None, None, None, False)
    results = []
    with run_in_torch(modeling, torch.float64):
        for run in (lambda x: ours(x, None, info)[0], theirs):
            leaf = x_BTC.clone().requires_grad_()
            y_BTC = run(leaf)
            y_BTC.square().sum().backward()
            results.append((y_BTC, leaf.grad))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("channels", [False, True])
def test_decays_of_zero_among_others_equal_the_recurrent_form(channels: bool):
    """Rates of 1e36 and steps between 1e-36 and 100: a token keeps the state or empties it."""
    torch.manual_seed(0)
    mixer = initialized(DeltaMixer(config_of({"decay_per_channel": channels}).shape_of("D"))).double()
    nn.init.normal_(mixer.in_proj.weight)
    nn.init.constant_(mixer.log_rate, 83)
    nn.init.constant_(mixer.step_bias, -80)
    x_BTC = torch.randn(1, 70, WIDTH, dtype=torch.float64)
    x_BTC[:, ::3] *= 40
    whole, info = (SequenceInfo.of(torch.zeros(1, tokens), None, None, None, True) for tokens in (70, 1))
    state, one_by_one = None, []
    for x_B1C in x_BTC.split(1, 1):
        y_B1C, state = mixer(x_B1C, state, info)
        one_by_one.append(y_B1C)
    torch.testing.assert_close(mixer(x_BTC, None, whole)[0], torch.cat(one_by_one, 1), rtol=1e-9, atol=1e-9)


def initialized(mixer: DeltaMixer) -> DeltaMixer:
    initialize(nn.ModuleDict({"mixer": mixer}), layers=1, std=0.02, seed=0)
    return mixer


def test_queries_and_keys_are_normalized_in_float32():
    x = torch.randn(1, 7, 2, 128).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        unit = unit_length(x)
    assert unit.dtype == torch.float32
    torch.testing.assert_close(unit.double().norm(dim=-1), torch.ones(1, 7, 2, dtype=torch.float64), rtol=0, atol=1e-6)


def test_sizes_follow_the_model_and_value_heads_are_a_multiple_of_key_heads():
    mixer = DeltaMixer(config_of({}).shape_of("D"))
    assert (mixer.key_heads, mixer.heads, mixer.key_size, mixer.value_size) == (2, 2, 6, 6)
    with pytest.raises(ConfigError, match=r"model\.delta\.value_heads 4 is not a multiple of the 3 key heads"):
        config_of({"qk_heads": 3, "value_heads": 4})
    with pytest.raises(ConfigError, match=r"decay_per_channel needs as many value heads as key heads, here 4 and 2"):
        config_of({"value_heads": 4, "decay_per_channel": True})
