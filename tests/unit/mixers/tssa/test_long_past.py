"""Float32 sums after a long past; tiles are in `test_layers_conform.py`."""

import pytest
import torch
from tssa_naive import causal_tssa_naive

from tost_lm.mixers.tssa.causal import tssa_step
from tost_lm.mixers.tssa.statistics import TssaState
from tost_lm.testing import FLOAT32_REORDERED, assert_as_accurate, assert_close

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("chunks_of_32_tokens")]


def test_single_tokens_do_not_drift_after_a_long_past():
    """After 2^20 tokens, what 256 more add to float32 sums of that size would be wrong by up to 3 %."""
    torch.manual_seed(0)
    w, temp = torch.randn(1, 256, 4, 8), torch.ones(4)
    sums = torch.full((1, 4, 8), 2.0**20)
    past = TssaState(sums, sums, sums[..., 0])
    y_t, state = tssa_step(w[:, 0], temp, None, past)
    for t in range(1, 256):
        y_t, state = tssa_step(w[:, t], temp, None, state)
    past_64 = TssaState(*(x.double() for x in past))
    y, exact = causal_tssa_naive(w.double(), temp.double(), initial_state=past_64)
    in_float32, _ = causal_tssa_naive(w, temp, initial_state=past)
    assert_as_accurate(y_t, in_float32[:, -1], y[:, -1])
    for after, before, truth in zip(state, past, exact, strict=True):
        assert_close(after.double() - before, truth - before, FLOAT32_REORDERED)
