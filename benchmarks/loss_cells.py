"""Cells of `benchmarks.loss`: one call of a rival, and calls of several in turns."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.loss import OURS, TORCH, WHOLE
from benchmarks.measure import call_seconds, interleaved_seconds, peak_extra_bytes
from tost_lm.ops.cross_entropy import linear_cross_entropy, logit_tile_tokens

WARM_UP_TOKENS = 64


def one_call(device: str, rival: str, tokens: int, **shape: Any) -> dict[str, Any]:
    """Memory and time of a single call: {"peak_bytes", "seconds": [one]}."""
    prepared(rival, device, WARM_UP_TOKENS, **shape)()
    call = prepared(rival, device, tokens, **shape)
    seconds: list[float] = []
    peak = peak_extra_bytes(lambda: seconds.append(call_seconds(call, device)), device)
    return {"peak_bytes": peak, "seconds": seconds}


def time_in_turns(
    device: str, rivals: dict[str, str], tokens: int, budget_s: float, **shape: Any
) -> dict[str, list[float]]:
    """Seconds of each call of each rival, by name."""
    calls = {name: prepared(name, device, tokens, **shape) for name in rivals}
    return interleaved_seconds(calls, device, budget_s=budget_s)


def prepared(
    rival: str, device: str, tokens: int, *, width: int, vocab_size: int, dtype: str, work: str
) -> Callable[[], None]:
    """The measured call; its inputs exist before it."""
    torch.manual_seed(0)
    x_MC, weight_VC = (
        torch.randn(rows, width, device=device, dtype=getattr(torch, dtype)).mul_(0.1).requires_grad_()
        for rows in (tokens, vocab_size)
    )
    labels_M = torch.randint(vocab_size, (tokens,), device=device)
    loss = _loss(rival, vocab_size, x_MC.dtype)

    def call() -> None:
        loss(x_MC, weight_VC, labels_M).backward()
        x_MC.grad = weight_VC.grad = None

    return call


def _loss(rival: str, words: int, dtype: torch.dtype) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if rival == OURS:
        return lambda x, weight, labels: linear_cross_entropy(x, weight, labels)[0]
    if rival == WHOLE:
        return lambda x, weight, labels: functional.cross_entropy(
            functional.linear(x, weight).float(), labels, reduction="sum"
        )
    from torch.nn import LinearCrossEntropyOptions  # torch 2.13 and newer

    tile_tokens = None if rival == TORCH else logit_tile_tokens(words, dtype)
    how = "auto" if rival == TORCH else None
    options = LinearCrossEntropyOptions(batch_chunk_size=tile_tokens, chunking_method=how)
    return lambda x, weight, labels: functional.linear_cross_entropy(
        x, weight, labels, reduction="sum", options=options
    )
