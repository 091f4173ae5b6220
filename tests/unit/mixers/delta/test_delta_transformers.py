"""The delta layer against those of transformers with the same weights: outputs, gradients, states and decoding.

Their layers run in PyTorch. They compute the recurrence in float32 for any dtype of their inputs; for float64 results,
float64 takes its place in their modules.
"""

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch
from public_layers import Parameters, renamed, run_in_torch
from torch import Tensor, nn
from torch.func import functional_call

from tost_lm.config import validate
from tost_lm.mixers.delta.layer import DeltaMixer, DeltaState
from tost_lm.model import ModelConfig
from tost_lm.ops.positions import SequenceInfo
from tost_lm.testing import assert_as_accurate

transformers = pytest.importorskip("transformers")

WIDTH, HEADS, SIZES, TOKENS = 24, (2, 4), (6, 10), 150
LAYERS = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextGatedDeltaNet"),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5GatedDeltaNet"),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridGatedDeltaNet"),
}


class Pair:
    """A layer of transformers with drawn weights, and ours of the same shape."""

    def __init__(self, kind: str, dtype: torch.dtype):
        self.kind, self.dtype = kind, dtype
        self.module: ModuleType = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
        config_class, layer_class = LAYERS[kind]
        self.config: Any = getattr(transformers, config_class)(
            hidden_size=WIDTH, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2, vocab_size=16,
            linear_num_key_heads=HEADS[0], linear_num_value_heads=HEADS[1], linear_key_head_dim=SIZES[0],
            linear_value_head_dim=SIZES[1], pad_token_id=None, rms_norm_eps=1e-3,
        )  # fmt: skip
        torch.manual_seed(0)
        self.theirs: nn.Module = getattr(self.module, layer_class)(self.config, 0)
        with torch.no_grad():
            for parameter in self.theirs.parameters():
                parameter += 0.2 * torch.randn(parameter.shape)
        self.theirs.to(dtype)
        shape = dict(zip(("qk_heads", "value_heads", "qk_size", "value_size"), (*HEADS, *SIZES), strict=True))
        tree = {
            "pattern": "D", "layers": 1, "heads": 2, "width": WIDTH, "vocab_size": 8,
            "delta": {**shape, **({"beta_to_two": True} if kind == "olmo_hybrid" else {"norm_epsilon": 1e-3})},
        }  # fmt: skip
        self.ours = DeltaMixer(validate(ModelConfig, tree, "test").shape_of("D")).to(dtype)
        self.leaves = {name: p.detach().clone().requires_grad_() for name, p in self.theirs.named_parameters()}

    def mix(self, x_BTC: Tensor, state: DeltaState | None = None, tokens: int = 0) -> tuple[Tensor, DeltaState]:
        """Our layer with their weights, as functions of which the result is differentiable."""
        info = SequenceInfo.of(x_BTC[..., 0], [tokens] * len(x_BTC), None)
        return functional_call(self.ours, renamed(self.kind, self.leaves, HEADS, SIZES), (x_BTC, state, info))

    def tokens(self, T: int) -> Tensor:
        return torch.randn(2, T, WIDTH, generator=torch.Generator().manual_seed(1)).to(self.dtype)


def results(pair: Pair, theirs: bool) -> Parameters:
    """Outputs, and gradients of the tokens and of the parameters by their names."""
    x_BTC = pair.tokens(TOKENS).requires_grad_()
    if theirs:
        with run_in_torch(pair.module, pair.dtype):
            y_BTC = pair.theirs(x_BTC)
            leaves = dict(pair.theirs.named_parameters())
            gradients = torch.autograd.grad(y_BTC.square().sum(), [x_BTC, *leaves.values()])
    else:
        y_BTC, _ = pair.mix(x_BTC)
        leaves = pair.leaves
        gradients = torch.autograd.grad(y_BTC.square().sum(), [x_BTC, *leaves.values()])
    return {"y": y_BTC, **dict(zip(("x", *leaves), gradients, strict=True))}


@pytest.mark.parametrize("kind", LAYERS)
def test_outputs_and_gradients_are_those_of_transformers(kind: str):
    pair = Pair(kind, torch.float64)
    assert renamed(kind, pair.leaves, HEADS, SIZES).keys() == dict(pair.ours.named_parameters()).keys()
    truth = results(pair, theirs=True)
    ours = results(pair, theirs=False)
    for name, x in truth.items():
        torch.testing.assert_close(ours[name], x, rtol=1e-10, atol=1e-10 * x.abs().max().item(), msg=name)
    narrow = Pair(kind, torch.float32)
    ours, theirs = results(narrow, theirs=False), results(narrow, theirs=True)
    for name, x in truth.items():
        assert_as_accurate(ours[name], theirs[name], x, name)


@pytest.mark.parametrize("kind", LAYERS)
@torch.no_grad()
def test_states_and_decoded_tokens_are_those_of_transformers(kind: str):
    pair = Pair(kind, torch.float64)
    x_BTC = pair.tokens(TOKENS + 3)
    cache = transformers.DynamicCache(config=pair.config)
    y_BTC, state = pair.mix(x_BTC[:, :TOKENS])
    with run_in_torch(pair.module, pair.dtype):
        expected = pair.theirs(x_BTC[:, :TOKENS], cache_params=cache)
    torch.testing.assert_close(y_BTC, expected, rtol=1e-10, atol=1e-10)
    for t in range(TOKENS, TOKENS + 3):
        y_BTC, state = pair.mix(x_BTC[:, t : t + 1], state, t)
        with run_in_torch(pair.module, pair.dtype):
            expected = pair.theirs(x_BTC[:, t : t + 1], cache_params=cache)
        torch.testing.assert_close(y_BTC, expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(state.memory, cache.get_recurrent_state(0), rtol=1e-10, atol=1e-10)
    (h, H), (K, V) = HEADS, SIZES
    taps = cache.get_conv_state(0)[..., -3:].mT.split([h * K, h * K, H * V], -1)
    taps = torch.cat([x.unflatten(-1, (h, -1)) for x in taps], -1).flatten(-2)
    torch.testing.assert_close(state.taps, taps, rtol=1e-10, atol=1e-10)
