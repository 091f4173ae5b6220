"""2^20 tokens of the gated delta rule, one at a time and in one call, against float64."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from tost_lm.mixers.delta.operator import delta_rule, delta_rule_step
from tost_lm.ops.layout import LocalDocuments

T, LAST = 1 << 20, 1 << 10
REGIMES = {
    "nothing is written": (0.0, 0.0),
    "weak writes, no decay": (0.0, 1e-3),
    "no decay": (0.0, 0.5),
    "slow decay": (-1e-4, 0.5),
    "all replaced, no decay": (0.0, 1.0),
    "reflections, no decay": (0.0, 2.0),
    "reflections, fast decay": (-0.1, 2.0),
}
"""log decay and β."""


def drawn(log_decay: float, beta: float) -> tuple[list[Tensor], Tensor]:
    """float32 tokens and a state."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator)
    query, key = (normalize(draw(1, T, 1, 4), dim=-1) for _ in range(2))
    gates = (torch.full((1, T, 1), x) for x in (log_decay, beta))
    return [query, key, draw(1, T, 1, 3), *gates], draw(1, 1, 4, 3)


def relative(found: Tensor, truth: Tensor) -> float:
    return ((found.double() - truth).norm() / truth.norm()).item()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("regime", REGIMES)
@torch.inference_mode()
def test_a_million_tokens_do_not_drift(regime: str):
    """The last outputs and the state: to 1e-9 step by step, and to 1e-5 in float32 chunks."""
    tokens, initial = drawn(*REGIMES[regime])
    local = LocalDocuments.of(None, 1, T, None)
    exact = [x.double() for x in tokens]
    truth, state = delta_rule(*exact, local=local, initial_state=initial, output_final_state=True)  # pyright: ignore[reportCallIssue]
    y, narrow = delta_rule(*tokens, local=local, initial_state=initial, output_final_state=True)  # pyright: ignore[reportCallIssue]
    assert state is not None
    assert narrow is not None
    in_chunks = max(relative(y[:, -LAST:], truth[:, -LAST:]), relative(narrow, state))
    stepped, steps = initial, []
    for t, token in enumerate(zip(*(x.unbind(1) for x in exact), strict=True)):
        y_t, stepped = delta_rule_step(*token, stepped)  # pyright: ignore[reportCallIssue]
        if t >= T - LAST:
            steps.append(y_t)
    in_steps = max(relative(torch.stack(steps, 1), truth[:, -LAST:]), relative(stepped, state))
    print(f"{regime}: chunks {in_chunks:.1e}, steps {in_steps:.1e}")
    assert in_steps <= 1e-9
    assert in_chunks <= 1e-5
