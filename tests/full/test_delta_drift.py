"""2^20 tokens of the gated delta rule, one at a time and in one call, against float64."""

import pytest
import torch
from delta_naive import delta_rule_naive
from torch import Tensor
from torch.nn.functional import normalize

from tost_lm.mixers.delta.operator import delta_rule, delta_rule_step
from tost_lm.ops.layout import LocalDocuments
from tost_lm.testing import assert_as_accurate

T, LAST = 1 << 20, 1 << 10
REGIMES = {
    "nothing is written": (0.0, 0.0),
    "weak writes, no decay": (0.0, 1e-3),
    "no decay": (0.0, 0.5),
    "slow decay": (-1e-4, 0.5),
    "all replaced, no decay": (0.0, 1.0),
    "reflections, no decay": (0.0, 2.0),
    "reflections, decay": (-0.1, 2.0),
}
"""log decay and β; a head each."""


@pytest.mark.timeout(1800)
@torch.inference_mode()
def test_a_million_tokens_do_not_drift():
    """The last outputs and the state: steps to 1e-9, float32 chunks like the recurrence in float32."""
    generator, H = torch.Generator().manual_seed(0), len(REGIMES)
    draw = lambda *shape: torch.randn(shape, generator=generator)
    query, key = (normalize(draw(1, T, H, 4), dim=-1) for _ in range(2))
    log_decay, beta = torch.tensor(list(REGIMES.values())).T.expand(1, T, 2, H).unbind(2)
    inputs, initial, local = (query, key, draw(1, T, H, 3), log_decay, beta), draw(1, H, 4, 3), rows(T)
    exact = [x.double() for x in inputs]
    truth, state = delta_rule(*exact, local=local, initial_state=initial, output_final_state=True)  # pyright: ignore[reportCallIssue]
    y, narrow = delta_rule(*inputs, local=local, initial_state=initial, output_final_state=True)
    by_token, by_token_state = delta_rule_naive(*inputs, local=local, initial_state=initial)
    assert state is not None
    assert narrow is not None
    stepped, steps = initial, []
    for t, token in enumerate(zip(*(x.unbind(1) for x in inputs), strict=True)):
        y_t, stepped = delta_rule_step(*token, stepped)  # pyright: ignore[reportCallIssue]
        if t >= T - LAST:
            steps.append(y_t)
    truth, y, by_token = (x[:, -LAST:] for x in (truth, y, by_token))
    for n, regime in enumerate(REGIMES):
        of_chunks, of_steps, of_tokens = (relative(x[:, n], state[:, n]) for x in (narrow, stepped, by_token_state))
        print(f"{regime}: chunks {of_chunks:.1e}, steps {of_steps:.1e}, the recurrence in float32 {of_tokens:.1e}")
        assert of_steps <= 1e-9
        assert relative(torch.stack(steps, 1)[:, :, n], truth[:, :, n]) <= 1e-6  # float32 outputs
        assert_as_accurate(narrow[:, n].float(), by_token_state[:, n], state[:, n], regime)
        assert_as_accurate(y[:, :, n], by_token[:, :, n], truth[:, :, n], regime)


def rows(tokens: int) -> LocalDocuments:
    return LocalDocuments.of(None, 1, tokens, None)


def relative(found: Tensor, truth: Tensor) -> float:
    return ((found.double() - truth).norm() / truth.norm()).item()
