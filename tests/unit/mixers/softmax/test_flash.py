"""Softmax layers by flash attention: what it is called with, against a transcription of it that runs here in float64.

The numbers of the kernels themselves are in tests/gpu.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

from tost_lm.config import validate
from tost_lm.mixers.softmax import attention, earlier_tiles
from tost_lm.model import ModelConfig, TostLM
from tost_lm.pretrain.tiled import tiled_backward

Where = tuple[Tensor, Tensor, int, int, bool, int, int]
"""Offsets of queries and keys, the longest of each, whether it is causal, and how far a query sees left and right."""


def scores_of(q: Tensor, k: Tensor, v: Tensor, where: Where) -> Iterator[tuple[slice, slice, Tensor]]:
    """Queries and keys of each document, and its scores [H, i, j]: the last query stands at the last key."""
    offsets_q, offsets_k, longest_q, longest_k, causal, left, right = where
    assert offsets_q.dtype == offsets_k.dtype == torch.int32
    assert len(offsets_q) == len(offsets_k)
    assert (int(offsets_q[-1]), int(offsets_k[-1])) == (len(q), len(k))
    assert (longest_q, longest_k) == (int(offsets_q.diff().max()), int(offsets_k.diff().max()))
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    assert right == (-1 if (left < 0 and not causal) else 0)
    for (a, b), (c, d) in zip(pairwise(offsets_q.tolist()), pairwise(offsets_k.tolist()), strict=True):
        i, j = torch.arange(d - c - (b - a), d - c)[:, None], torch.arange(d - c)
        visible = ((j <= i) | (right < 0)) & ((j >= i - left) | (left < 0))
        scores = torch.einsum("ihd,jhd->hij", q[a:b], shared(k[c:d], q)) * q.shape[-1] ** -0.5
        yield slice(a, b), slice(c, d), scores.masked_fill(~visible, -torch.inf)


def shared(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Where]]:
    """The calls of flash attention, which runs wherever CUDA would run it."""
    made: list[Where] = []

    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any, window_size_left: int, window_size_right: int) -> Any:
        *offsets_and_longest, dropout, causal, debug = rest
        assert (dropout, debug) == (0.0, False)
        where: Any = (*offsets_and_longest, causal, window_size_left, window_size_right)
        made.append(where)
        y, log_sum = torch.empty_like(q), q.new_empty(q.shape[1], len(q))
        for queries, keys, scores in scores_of(q, k, v, where):
            y[queries] = torch.einsum("hij,jhd->ihd", scores.softmax(-1), shared(v[keys], q))
            log_sum[:, queries] = scores.logsumexp(-1)
        return y, log_sum, *(q.new_empty(0) for _ in range(3))

    def backward(
        dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, log_sum: Tensor, *rest: Any,
        window_size_left: int, window_size_right: int,
    ) -> Any:  # fmt: skip
        *offsets_and_longest, dropout, causal, _, _ = rest
        assert dropout == 0.0
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        where: Any = (*offsets_and_longest, causal, window_size_left, window_size_right)
        for queries, keys, scores in scores_of(q, k, v, where):
            pi = (scores - log_sum[:, queries, None]).exp()
            d_pi = torch.einsum("ihd,jhd->hij", dy[queries], shared(v[keys], q))
            d_scores = pi * (d_pi - (dy[queries] * y[queries]).sum(-1).T[..., None]) * q.shape[-1] ** -0.5
            dq[queries] = torch.einsum("hij,jhd->ihd", d_scores, shared(k[keys], q))
            for d, found in ((dk, (d_scores, q)), (dv, (pi, dy))):
                of_heads = torch.einsum("hij,ihd->jhd", found[0], found[1][queries])
                d[keys] = of_heads.unflatten(1, (k.shape[1], -1)).sum(2)
        return dq, dk, dv

    for module, name in ((attention, "BACKENDS"), (earlier_tiles, "PARTS")):
        monkeypatch.setattr(module, name, [getattr(module, name)[0]._replace(obstacle=None)])
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    yield made
    library._destroy()


MODELS = {
    "full": {"softmax": {}},
    "window": {"softmax": {"window": 7}},
    "grouped in full": {"softmax": {"kv_heads": 1}},
    "grouped": {"softmax": {"kv_heads": 2, "qk_norm": True, "window": 12}},
}
TOKENS = 40


def model_of(name: str) -> TostLM:
    torch.manual_seed(0)
    shape = {"pattern": "TA", "layers": 2, "heads": 4, "width": 32, "vocab_size": 20, "positions": "none"}
    return TostLM(validate(ModelConfig, {**shape, **MODELS[name]}, "test")).double()


def packed(model: TostLM, tokens: Tensor) -> Tensor:
    cu_seqlens = torch.tensor([0, 1, 9, 30, 40], dtype=torch.int32)
    return model(tokens[:1], cu_seqlens=cu_seqlens).logits


def in_two_tiles(model: TostLM, tokens: Tensor) -> Tensor:
    """The document continues in the second call, which has another."""
    first = model(tokens[:1, :21], cu_seqlens=torch.tensor([0, 21]))
    second = model(tokens[:1, 21:], state=first.state, cu_seqlens=torch.tensor([0, 11, 19]))
    return torch.cat([first.logits, second.logits], 1)


def rows_in_two_calls(model: TostLM, tokens: Tensor) -> Tensor:
    first = model(tokens[:, :17])
    return torch.cat([first.logits, model(tokens[:, 17:], state=first.state).logits], 1)


def losses_in_tiles(model: TostLM, tokens: Tensor) -> Tensor:
    return tiled_backward(model, tokens[:, :-1], tokens[:, 1:], 16)


def made_by_flash(name: str, request: pytest.FixtureRequest, run: Callable[[TostLM, Tensor], Tensor]) -> list[Where]:
    """The calls of flash attention in `run`, whose results and gradients equal those without it."""
    model, tokens = model_of(name), torch.randint(20, (2, TOKENS), generator=torch.Generator().manual_seed(1))

    def results() -> list[Tensor]:
        model.zero_grad()
        y = run(model, tokens)
        if y.requires_grad:
            y.backward(torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y))
        return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    expected = results()
    made = request.getfixturevalue("calls")
    for ours, theirs in zip(results(), expected, strict=True):
        assert_close(ours, theirs, rtol=0, atol=1e-11)
    return made


@pytest.mark.parametrize("run", [packed, in_two_tiles, rows_in_two_calls])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_the_tiles(
    name: str, run: Callable[[TostLM, Tensor], Tensor], request: pytest.FixtureRequest
):
    assert len(made_by_flash(name, request, run)) == (1 if run is packed else 2)


@pytest.mark.parametrize("name", ["full", "grouped in full"])
def test_exact_tiles_are_those_of_the_cpu(name: str, request: pytest.FixtureRequest):
    made = made_by_flash(name, request, losses_in_tiles)
    # Of the tiles before the last one, forward twice: to themselves, and to 0 or 1 earlier ones; the last one once.
    assert [where[4] for where in made] == [True, True, False, True, False, False, True, False, True]


def test_it_runs_on_cuda_in_16_bit_types_with_channels_that_it_supports():
    def runs(dtype: torch.dtype, channels: int, device: str = "cuda") -> bool:
        with FakeTensorMode():
            return attention.obstacle_to_flash(torch.empty(1, 1, 1, channels, dtype=dtype, device=device)) is None

    assert not runs(torch.bfloat16, 64, "cpu")
    assert runs(torch.bfloat16, 64)
    assert runs(torch.float16, 256)
    assert not runs(torch.float32, 64)
    assert not runs(torch.bfloat16, 257)
    assert not runs(torch.bfloat16, 12)
