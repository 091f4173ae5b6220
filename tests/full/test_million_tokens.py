"""2^20 tokens: one at a time, as in decoding, and in one call."""

import pytest
import torch
from agreement import assert_long_sequence_is_right
from tssa_naive import causal_tssa_naive

from tost_lm.mixers.tssa.causal import tssa_step
from tost_lm.mixers.tssa.statistics import TssaState
from tost_lm.testing import assert_as_accurate

T = 1 << 20
LAST = 64


@pytest.mark.timeout(1200)
@torch.inference_mode()
def test_a_million_single_tokens_do_not_drift():
    torch.manual_seed(0)
    w, temp = torch.randn(1, T, 3, 4), torch.tensor([0.5, 1.0, 1.5])
    state = TssaState.empty(1, 3, 4, like=w)
    ys = []
    for t in range(T):
        y_t, state = tssa_step(w[:, t], temp, None, state)
        ys.append(y_t)
    truth, exact = causal_tssa_naive(w.double(), temp.double())
    in_float32, narrow = causal_tssa_naive(w, temp)
    assert_as_accurate(torch.stack(ys[-LAST:], 1), in_float32[:, -LAST:], truth[:, -LAST:])
    for ours, theirs, expected in zip(state, narrow, exact, strict=True):
        assert_as_accurate(ours.float(), theirs, expected)


def test_a_million_tokens_in_one_call():
    assert_long_sequence_is_right(T)
