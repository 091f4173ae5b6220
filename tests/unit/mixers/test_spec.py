"""The spec of each mixer against its layer."""

import pytest
import torch

from tost_lm.mixers.layer import TokenMixer
from tost_lm.mixers.registry import SPECS, MixerSettings, mixer_class
from tost_lm.mixers.spec import MixerSpec
from tost_lm.model import ModelConfig

pytestmark = pytest.mark.quick

SETTINGS = [
    {},
    {"bias": True, "tssa": {"denom_bias": "head"}, "softmax": {"kv_heads": 2, "qk_norm": True}},
    {"softmax": {"kv_heads": 2, "qk_norm": "all-heads", "head_size": 6, "gate": True}},
    {"delta": {"qk_heads": 4, "value_heads": 8, "qk_size": 3, "value_size": 5}},
    {"delta": {"value_size": 5, "decay_per_channel": True}},
    {"tssa": {"denom_bias": "none"}, "softmax": {"window": 4, "rope_theta": 0.0}},
]


def layer(letter: str, settings: dict) -> tuple[ModelConfig, TokenMixer]:
    config = ModelConfig(layers=1, heads=4, width=32, vocab_size=8, max_positions=16, pattern=letter, **settings)
    with torch.device("meta"):
        return config, mixer_class(letter)(config.shape_of(letter))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("letter", SPECS)
def test_numbers_are_those_of_the_layer(letter: str, settings: dict):
    spec, (config, mixer) = SPECS[letter], layer(letter, settings)
    shape = config.shape_of(letter)
    assert mixer.in_proj.weight.shape == (spec.channels_in(shape), config.width)
    assert mixer.out_proj.weight.shape == (config.width, spec.channels_out(shape))
    own = {name: p for name, p in mixer.named_parameters() if not name.startswith(("in_proj.", "out_proj."))}
    count, whole = spec.own_numbers(shape), [p for name, p in own.items() if name not in mixer.OF_HEADS]
    assert count.decayed + count.vectors + count.replicated == sum(p.numel() for p in own.values())
    decayed = [p for name, p in own.items() if p.dim() > 1 and name != "denom_bias"]  # as in optim/adamw.py
    assert count.decayed == sum(p.numel() for p in decayed)
    assert (count.replicated, count.replicated_tensors) == (sum(p.numel() for p in whole), len(whole))
    assert all(p.shape[0] % config.heads == 0 for name, p in own.items() if name in mixer.OF_HEADS)


@pytest.mark.parametrize("letter", SPECS)
def test_each_mixer_owns_its_settings_and_what_others_ask(letter: str):
    kind = mixer_class(letter)
    assert issubclass(kind, TokenMixer)
    assert SPECS[letter].folder in MixerSettings.model_fields
    assert all(hasattr(kind.State, name) for name in ("_fields", "to_running_dtype"))


def test_a_mixer_without_a_fact_cannot_be_made():
    names = {name for name in MixerSpec.__abstractmethods__ if name != "launches"}
    incomplete = type("Incomplete", (MixerSpec,), {name: lambda *_: None for name in names})
    with pytest.raises(TypeError, match=r"abstract method '?launches'?"):
        incomplete()
