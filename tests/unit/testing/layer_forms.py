"""Every mixer of the registry, by default and in other forms."""

from typing import Any

import pytest
from other_forms import other_forms

from tost_lm.config import validate
from tost_lm.mixers.registry import SPECS
from tost_lm.model import ModelConfig

OTHER_FORMS: dict[str, list[dict[str, Any]]] = {
    "T": [
        {"tssa": {"denom_bias": "head"}, "bias": True},
        {"tssa": {"denom_bias": "none"}},
    ],
    "D": [
        {"delta": {"qk_heads": 1, "value_heads": 2, "qk_size": 5, "value_size": 3, "beta_to_two": beta_to_two}}
        for beta_to_two in (False, True)
    ]
    + [{"delta": {"decay_per_channel": True}}],
    "A": [
        {"softmax": {"window": 5, "kv_heads": 1, "qk_norm": True}},
        {"softmax": {"window": 1, "rope_theta": 0.0}},
        {"softmax": {"conv": True, "kv_heads": 1, "gate": True}},
        other_forms(),
    ],
}
LAYERS = [
    pytest.param(letter, form, id=f"{letter} {form}") for letter in SPECS for form in [{}, *OTHER_FORMS.get(letter, [])]
]
"""Letter and settings."""


def config_of(letter: str, settings: dict[str, Any]) -> ModelConfig:
    shape = {"pattern": letter, "layers": 1, "heads": 2, "width": 8, "vocab_size": 8, "max_positions": 64}
    return validate(ModelConfig, {**shape, **settings}, "test")
