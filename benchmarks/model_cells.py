"""Cells of `benchmarks.model`: one call of a model, and calls of several in turns."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.measure import call_seconds, interleaved_seconds, peak_extra_bytes
from benchmarks.model import DECODING, TRAINING
from tost_lm.config import validate
from tost_lm.inference.generation import state_bytes
from tost_lm.mixers.softmax.cache import KeyValueState
from tost_lm.mixers.tssa.naive import TssaState
from tost_lm.model import LMState, ModelConfig, TostLM
from tost_lm.model.streaming import TILE_TOKENS, prefill

WARM_UP_TOKENS = 64
TOKENS_IN_ROUND, ROUNDS = 32, 31  # to resolve percents of a ratio near 1, since one token takes milliseconds


def one_call(device: str, work: str, tokens: int, dtype: str, rival: dict[str, Any]) -> dict[str, Any]:
    """Memory and time of a single call, {"peak_bytes", "seconds": [one], "state_bytes" of decoding}."""
    model = _model(rival, device, dtype)
    _prepared(model, work, min(tokens, WARM_UP_TOKENS), rival)[0]()
    model.zero_grad()
    call, state = _prepared(model, work, tokens, rival)
    seconds: list[float] = []
    peak = peak_extra_bytes(lambda: seconds.append(call_seconds(call, device)), device)
    return {"peak_bytes": peak, "seconds": seconds, "state_bytes": state_bytes(state) if state else 0}


def time_in_turns(
    device: str, work: str, tokens: int, dtype: str, rivals: dict[str, dict[str, Any]], budget_s: float
) -> dict[str, list[float]]:
    """Seconds of each call of each rival, by name."""
    calls = {name: _prepared(_model(rival, device, dtype), work, tokens, rival)[0] for name, rival in rivals.items()}
    return interleaved_seconds(calls, device, budget_s=budget_s)


def contexts_in_turns(
    device: str, lengths: list[int], dtype: str, rival: dict[str, Any], budget_s: float
) -> dict[str, Any]:
    """Decoding after contexts of several lengths, in turns in one process: seconds of rounds of tokens, and bytes of
    the state, a row for each length. A pure TSSA model has really read the contexts."""
    model = _model(rival, device, dtype)
    constant = set(model.config.pattern) == {"T"}
    calls, sizes = {}, []
    for tokens in lengths:
        call, state = _prepared(model, DECODING, tokens, rival, really=constant)
        assert state is not None
        calls[str(tokens)] = partial(_repeat, call, TOKENS_IN_ROUND if constant else 1)
        sizes.append(state_bytes(state))
    seconds = interleaved_seconds(calls, device, budget_s=budget_s, repeats=ROUNDS)
    return {"seconds": [seconds[str(tokens)] for tokens in lengths], "state_bytes": sizes}


def _repeat(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()


def _model(rival: dict[str, Any], device: str, dtype: str) -> TostLM:
    torch.manual_seed(0)
    return TostLM(validate(ModelConfig, rival["settings"], "benchmark")).to(device, getattr(torch, dtype))


def _prepared(
    model: TostLM, work: str, tokens: int, rival: dict[str, Any], really: bool = False
) -> tuple[Callable[[], object], LMState | None]:
    """The measured call, and the state before decoding (`really`: after reading the tokens)."""
    backend = rival["attention"]
    kernel: Callable[[], Any] = (lambda: sdpa_kernel(getattr(SDPBackend, backend))) if backend else nullcontext
    device = model.embedding.weight.device
    if work == TRAINING:
        ids_1T = torch.randint(model.config.vocab_size, (1, tokens + 1), device=device)

        def train() -> None:
            with kernel():
                loss = model(ids_1T[:, :-1], labels=ids_1T[:, 1:]).loss
                loss.backward()
            model.zero_grad()

        return train, None
    state = _state_of_reading(model, tokens) if really else _state_after(model, tokens)
    token_11 = torch.zeros(1, 1, dtype=torch.int64, device=device)

    @torch.inference_mode()
    def decode() -> Tensor:
        with kernel():
            return model(token_11, state=state).logits

    return decode, state


def _state_of_reading(model: TostLM, tokens: int) -> LMState:
    lengths = [min(TILE_TOKENS, tokens - start) for start in range(0, tokens, TILE_TOKENS)]
    state = prefill(model, (torch.randint(model.config.vocab_size, (1, length)) for length in lengths)).state
    assert state is not None
    return state


@torch.inference_mode()
def _state_after(model: TostLM, tokens: int) -> LMState:
    """A state as after this many tokens. Keys and values are drawn: computing them would take quadratic time, and their
    values do not affect the time."""
    token_11 = torch.zeros(1, 1, dtype=torch.int64, device=model.embedding.weight.device)
    state = model(token_11, state=model(token_11).state).state  # statistics in the precision of decoding
    layers = []
    for layer in state.layers:
        if isinstance(layer, KeyValueState):
            _, H, _, D = layer.key.shape
            layers.append(KeyValueState(*(layer.key.new_empty(1, H, tokens, D).normal_() for _ in range(2))))
        elif isinstance(layer, TssaState):
            layers.append(layer._replace(count=torch.full_like(layer.count, tokens)))
        else:
            layers.append(layer)
    return LMState(tuple(layers), (tokens,))
