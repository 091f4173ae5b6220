"""The bytes of a state in the specs of mixers, which memory plans read, are those of the model's state."""

from typing import Any

import pytest
import torch

from tost_lm.config import validate
from tost_lm.inference.generation import state_bytes
from tost_lm.mixers.spec import Load
from tost_lm.model import ModelConfig, TostLM


@pytest.mark.parametrize(
    "settings",
    [
        {"pattern": "T"},
        {"pattern": "D"},
        {"pattern": "A", "softmax": {"kv_heads": 2}},
        {"pattern": "A", "softmax": {"window": 8}},
        {"pattern": "DA"},
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens", [20, 41])
@torch.no_grad()
def test_the_state_has_the_bytes_of_the_specs(settings: dict[str, Any], tokens: int):
    shape = {"layers": 2, "heads": 4, "width": 32, "vocab_size": 50, "positions": "none"}
    config = validate(ModelConfig, {"tssa": {"denom_bias": "head"}, **shape, **settings}, "test")
    state = TostLM(config)(torch.randint(50, (1, tokens))).state  # in training mode there is no spare memory
    assert state is not None
    loads = [(spec, Load(shape, 4, True, tokens, tokens, tokens, 1, 1, 1)) for spec, shape in config.mixers]
    expected = sum(spec.layers(config.letters) * spec.state_bytes(load) for spec, load in loads)
    assert state_bytes(state) == expected
