"""The conformance harness on flash-linear-attention: float32, in Triton's interpreter without a GPU.

The layers of `fla.layers` need the package flash-linear-attention, of which fla-core has the operators only.
"""

import importlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, normalize, pad
from torch.utils._pytree import tree_leaves, tree_map

from tost_lm.testing.conformance import EQUALITIES, MixerAdapter, check

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("fla")
pytestmark = pytest.mark.timeout(1800)

HEADS, CHANNELS = 2, 16
FLOAT32: dict[str, Any] = {"dtype": torch.float32, "bound": 1e-4}
LATER, STATE, SINGLE, DOCUMENTS, TILES, RANKS, SLOPES, WINDOW, NAN = EQUALITIES


@pytest.fixture(autouse=True)
def no_autotuning(monkeypatch: pytest.MonkeyPatch):
    """Without a GPU nothing can be timed: kernels take the first of their block sizes."""
    if DEVICE == "cpu":
        monkeypatch.setattr("triton.runtime.autotuner.Autotuner._bench", lambda *_, **__: [1.0, 1.0, 1.0])


def assert_fails(adapter: MixerAdapter, expected: list[str]) -> None:
    report = check(adapter, tokens=16)
    print(report)
    assert report.with_result("fails") == expected, str(report)


class Operator(nn.Module):
    """A reference operator of fla, with q, k, v and the gates that it takes as projections of x."""

    def __init__(self, gates: tuple[str, ...]):
        super().__init__()
        self.gates = gates
        self.in_proj = nn.Linear(CHANNELS, 5 * CHANNELS)

    def forward(self, x_BTC: Tensor, operator: Callable[..., Any], state: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, gate, beta = self.in_proj(x_BTC).unflatten(-1, (5, HEADS, -1)).unbind(-3)
        per_head = {"g": logsigmoid(gate[..., 0]), "g of channels": logsigmoid(gate), "gk": logsigmoid(gate)}
        values = {**per_head, "beta": beta[..., 0].sigmoid()}
        gates = {gate.split()[0]: values[gate] for gate in self.gates}
        y, state = operator(q, normalize(k, dim=-1), v, **gates, initial_state=state, output_final_state=True)
        assert state is not None
        return y.flatten(-2), state


def call_operator(
    path: str, mixer: Operator, x_BTC: Tensor, *, state: Tensor | None, **_: Any
) -> tuple[Tensor, Tensor]:
    module, name = path.split(":")
    return mixer(x_BTC, getattr(importlib.import_module(f"fla.ops.{module}.naive"), name), state)


@pytest.mark.parametrize(
    ("path", "gates"),
    [
        ("linear_attn:naive_recurrent_linear_attn", ()),
        ("simple_gla:naive_recurrent_simple_gla", ("g",)),
        ("gla:naive_recurrent_gla", ("gk",)),
        ("gated_delta_rule:naive_recurrent_gated_delta_rule", ("g", "beta")),
        ("kda:naive_recurrent_kda", ("g of channels", "beta")),
    ],
)
def test_reference_operators_conform(path: str, gates: tuple[str, ...]):
    build, call = partial(Operator, gates), partial(call_operator, path)
    assert_fails(MixerAdapter(path, CHANNELS, build, call, has_documents=False, **FLOAT32), [])


def build_layer(name: str, settings: dict[str, Any]) -> nn.Module:
    layers = importlib.import_module("fla.layers")
    return getattr(layers, name)(layer_idx=0, hidden_size=CHANNELS, num_heads=HEADS, **settings).to(DEVICE)


def call_layer(
    mixer: nn.Module, x_BTC: Tensor, *, state: dict[str, Any] | None, cu_seqlens: Tensor | None, **_: Any
) -> tuple[Tensor, dict[str, Any]]:
    """The state is what the layer writes to its cache."""
    cache = importlib.import_module("fla.models.utils").Cache()
    if state is not None:
        documents = len(x_BTC) if cu_seqlens is None else len(cu_seqlens) - 1
        missing = documents - len(tree_leaves(state)[0])
        state = tree_map(lambda x: pad(x, (0, 0) * (x.dim() - 1) + (0, missing)), state)
        cache.update(layer_idx=0, offset=1, **state)  # pyright: ignore[reportCallIssue]
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(x_BTC.device)
    y, _, cache = mixer(x_BTC, past_key_values=cache, use_cache=True, cu_seqlens=cu_seqlens)
    return y, {name: tuple(x) if isinstance(x, list) else x for name, x in cache[0].items() if x is not None}


RECURRENT = {"mode": "fused_recurrent"}


@pytest.mark.parametrize(
    ("name", "settings", "fails"),
    [
        ("GatedLinearAttention", RECURRENT, []),
        ("GatedSlotAttention", {**RECURRENT, "num_slots": 8}, []),
        # A call of fewer tokens than the convolution's 4 loses gradients of earlier tokens; its outputs are exact.
        ("GatedLinearAttention", {**RECURRENT, "use_short_conv": True}, [STATE, SINGLE, TILES]),
        ("DeltaNet", RECURRENT, [STATE, SINGLE, TILES]),
        # With a cache it decodes single tokens only.
        ("Mamba2", {"head_dim": CHANNELS, "state_size": 8}, [STATE, SINGLE, DOCUMENTS, TILES, NAN]),
    ],
    ids=str,
)
def test_layers_conform_as_far_as_they_run(name: str, settings: dict[str, Any], fails: list[str]):
    pytest.importorskip("fla.layers", reason="flash-linear-attention is not installed, only fla-core")
    build = partial(build_layer, name, settings)
    assert_fails(MixerAdapter(name, CHANNELS, build, call_layer, **FLOAT32), fails)
