"""Causal attention in blocks against the formula with a whole mask, in float64, with gradients; and its backends."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from largest import Largest
from torch import Tensor
from torch.testing import assert_close

from tost_lm.mixers.softmax import attention
from tost_lm.mixers.softmax.attention import causal_attention


def by_formula(q: Tensor, k: Tensor, v: Tensor, window: int, before_B: Tensor | None) -> Tensor:
    T, S = q.shape[2], k.shape[2]
    i, j = torch.arange(S - T, S)[:, None], torch.arange(S)
    visible = (j <= i) & ((i - j < window) if window else True)
    if before_B is not None:
        visible = visible & (j >= (S - T - before_B)[:, None, None, None])
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, float("-inf"))
    return scores.softmax(-1) @ v


def drawn(B: int, T: int, S: int, kv_heads: int = 2) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((2, T), (kv_heads, S), (kv_heads, S))
    return [torch.randn(B, *shape, 4, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.quick
@pytest.mark.parametrize("window", [0, 1, 5, 128, 129, 300, 10_000])
@pytest.mark.parametrize(("T", "leading"), [(300, 0), (300, 40), (290, 280), (1, 200), (1, 0), (128, 1)])
@pytest.mark.parametrize("ragged", [False, True])
def test_blocks_are_one_attention(window: int, T: int, leading: int, ragged: bool):
    q, k, v = drawn(3, T, leading + T, kv_heads=1 if window % 2 else 2)
    before_B = torch.tensor([leading, leading // 2, 0]) if ragged else None
    ours = causal_attention(q, k, v, window=window, before_B=before_B)
    theirs = by_formula(q, k, v, window, before_B)
    assert_close(ours, theirs, rtol=0, atol=1e-13)
    pull = torch.randn_like(ours)
    for a, b in zip(*(torch.autograd.grad(y, [q, k, v], pull) for y in (ours, theirs)), strict=True):
        assert_close(a, b, rtol=0, atol=1e-12)


def test_more_earlier_tokens_than_leading_keys_count_as_all():
    q, k, v = drawn(2, 3, 8)
    ours = causal_attention(q, k, v, window=6, before_B=torch.tensor([70, 5]))
    assert_close(ours, by_formula(q, k, v, 6, None), rtol=0, atol=1e-13)


PROGRAM = """
import sys, torch
from tost_lm.model import ModelConfig, TostLM
model = TostLM(ModelConfig(pattern="TDA", layers=3, heads=2, width=8, vocab_size=8))
model(torch.zeros(1, 4, dtype=torch.int64)).logits.sum().backward()
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
def test_a_model_imports_no_compiler():
    """The compiler takes as long to import as all else that a model needs."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize(("T", "window"), [(300, 0), (300, 5), (1, 5)])
def test_only_our_calls_are_without_cudnn(T: int, window: int, monkeypatch: pytest.MonkeyPatch):
    seen: list[bool] = []

    def attend(*tensors: Any, **options: Any) -> Tensor:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return torch.nn.functional.scaled_dot_product_attention(*tensors, **options)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", attend)
    q, k, v = drawn(1, T, 300)
    causal_attention(q, k, v, window).sum().backward()
    assert {*seen} == {False}
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("window", [0, 64])
def test_no_tensor_of_tokens_times_tokens(window: int):
    """Forward and backward, the full kernel and a window: nothing larger than two blocks of scores or the input."""
    T = 4096
    q, k, v = (torch.randn(1, 1, T, 8, requires_grad=True) for _ in range(3))
    with Largest() as largest:
        causal_attention(q, k, v, window).sum().backward()
    assert largest.numbers <= T * 8


def test_under_autocast_the_backward_of_a_block_computes_as_its_forward():
    q, k, v = (x.detach().float().requires_grad_() for x in drawn(1, 300, 300))
    with torch.autocast("cpu", torch.bfloat16):
        y = causal_attention(q.bfloat16(), k, v, window=5)
    for gradient in torch.autograd.grad(y.float().sum(), [q, k, v]):
        assert gradient.isfinite().all()
