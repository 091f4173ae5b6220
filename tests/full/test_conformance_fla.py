"""The conformance harness on the reference operators of fla-core, in float32."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from fla_core import fla_core
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, normalize

from tost_lm.testing.conformance import MixerAdapter, check

fla_core()
pytestmark = pytest.mark.timeout(1800)

HEADS, CHANNELS = 2, 16
FLOAT32: dict[str, Any] = {"dtype": torch.float32, "bound": 1e-4}


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
    report = check(MixerAdapter(path, CHANNELS, build, call, has_documents=False, **FLOAT32), tokens=16)
    assert not report.with_result("fails"), str(report)
