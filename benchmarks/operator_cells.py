"""Cells of `benchmarks.operator`: one call of a rival, calls of several in turns, calls beside a busy process, and
beside matrix products."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu, softplus

from benchmarks.measure import call_seconds, interleaved_seconds, median_seconds, peak_extra_bytes
from benchmarks.operator import BOTH, COMPILED, DELTA, FORWARD, NAIVE, OURS, SOFTMAX
from tost_lm.mixers.delta.layer import initial_decays, unit_length
from tost_lm.mixers.delta.operator import delta_rule
from tost_lm.mixers.delta.settings import CHUNK_TOKENS, CONV_TAPS, GROUP_CHUNKS, GROUP_ELEMENTS
from tost_lm.mixers.tssa import naive
from tost_lm.mixers.tssa.causal import causal_tssa
from tost_lm.mixers.tssa.naive import TssaState
from tost_lm.ops.layout import LocalDocuments
from tost_lm.ops.short_conv import short_conv

WARM_UP_TOKENS = 64
COPIED_BYTES = {"cpu": 1 << 29, "cuda": 1 << 32}


def copy_bandwidth(device: str) -> dict[str, float]:
    """Bytes per second that a large copy reads and writes."""
    source = torch.ones(COPIED_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = median_seconds(lambda: target.copy_(source), device, repeats=15)
    return {"bytes_per_second": 2 * len(source) / seconds}


def one_call(device: str, rival: str, tokens: int, **shape: Any) -> dict[str, Any]:
    """Memory and time of a single call: {"peak_bytes", "w_bytes", "seconds": [one]}."""
    warm_up = tokens if rival == COMPILED else min(tokens, WARM_UP_TOKENS)  # compiled for this length before timing
    run = _operator(rival)
    prepared(rival, run=run, device=device, tokens=warm_up, **shape)()
    call = prepared(rival, run=run, device=device, tokens=tokens, **shape)
    seconds: list[float] = []
    peak = peak_extra_bytes(lambda: seconds.append(call_seconds(call, device)), device)
    w_bytes = shape["batch"] * tokens * shape["heads"] * shape["channels"] * getattr(torch, shape["dtype"]).itemsize
    return {"peak_bytes": peak, "w_bytes": w_bytes, "seconds": seconds}


def time_in_turns(
    device: str, rivals: dict[str, str], tokens: int, budget_s: float, **shape: Any
) -> dict[str, list[float]]:
    """Seconds of each call of each rival, by name."""
    calls = {name: prepared(name, device=device, tokens=tokens, **shape) for name in rivals}
    return interleaved_seconds(calls, device, budget_s=budget_s)


def beside_a_busy_process(device: str, tokens: int, **shape: Any) -> dict[str, Any]:
    """Seconds of forward + backward while another process uses one core, and in turns while it is suspended."""
    call = prepared(OURS, device=device, tokens=tokens, work=BOTH, **shape)
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])

    def with_signal(signum: signal.Signals) -> Callable[[], None]:
        return lambda: (busy.send_signal(signum), call())[1]

    calls = {"quiet_seconds": with_signal(signal.SIGSTOP), "seconds": with_signal(signal.SIGCONT)}
    try:
        seconds = interleaved_seconds(calls, device, budget_s=30)
    finally:
        busy.kill()
    wait_policy = os.environ.get("OMP_WAIT_POLICY", "active")
    return {**seconds, "threads": torch.get_num_threads(), "wait_policy": wait_policy}


def beside_its_products(device: str, tokens: int, batch: int, heads: int, channels: int, dtype: str) -> dict[str, Any]:
    """Seconds of forward + backward of the delta rule, and in turns of the matrix products in them."""
    make = lambda *shape: torch.randn(batch, tokens, heads, *shape, device=device, dtype=getattr(torch, dtype))
    inputs = [make(channels), unit_length(make(channels)), unit_length(make(channels)), -make().exp(), make().sigmoid()]
    local = LocalDocuments.of(None, batch, tokens, None)

    def rule(value: Tensor, key: Tensor, query: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        return delta_rule(query, key, value, log_decay, beta, local=local)[0]

    calls = {
        "seconds": called(rule, inputs, BOTH),
        "product_seconds": delta_products(device, tokens, batch * heads, channels),
    }
    return interleaved_seconds(calls, device, budget_s=30)


def delta_products(device: str, tokens: int, heads: int, channels: int) -> Callable[[], None]:
    """The matrix products of forward + backward of `delta_rule_chunks`, as many at once, into memory that exists.

    A triangular system that is solved counts as a product.
    """
    L, c = CHUNK_TOKENS, max(GROUP_CHUNKS, GROUP_ELEMENTS // (heads * CHUNK_TOKENS**2))
    make = lambda *shape: torch.randn(*shape, device=device)
    x, faded, d_both = (make(c, heads, 2 * L, channels) for _ in range(3))
    value, y, d_key = (make(c, heads, L, channels) for _ in range(3))
    states, scores, d_scores = make(c, heads, channels, channels), make(c, heads, 2 * L, L), make(c, heads, L, 2 * L)
    key, system = x[:, :, L:], make(c, heads, L, L)
    state, new_state, read, solved = states[0].clone(), states[0].clone(), x[0].clone(), y[0].clone()

    def of_all_chunks(*products: tuple[Tensor, Tensor, Tensor]) -> None:
        for left, right, out in products:
            torch.bmm(left.flatten(0, 1), right.flatten(0, 1), out=out.flatten(0, 1))

    def call() -> None:
        groups = -(-tokens // (c * L))
        for _ in range(groups):
            of_all_chunks((x, key.mT, scores))
            for i in range(c):
                torch.bmm(x[i], state, out=read)
                torch.bmm(system[i], value[i], out=solved)
                torch.bmm(key[i].mT, value[i], out=new_state)
            of_all_chunks((system, value, y))
        for _ in range(groups):
            of_all_chunks((x, key.mT, scores), (system.mT, value, y))
            for i in range(c - 1):
                torch.bmm(key[i].mT, value[i], out=states[i + 1])
            for i in reversed(range(c)):
                torch.bmm(value[i], state.mT, out=d_key[i])
                torch.bmm(key[i], state, out=y[i])
                torch.bmm(system[i], value[i], out=solved)
                torch.bmm(x[i].mT, faded[i], out=new_state)
            of_all_chunks((faded, value.mT, scores), (faded, states.mT, d_both), (system, key, y), (d_scores, x, d_key))

    return call


def _operator(rival: str) -> Callable[..., Tensor]:
    if rival == OURS:
        return lambda w, temp, bias: causal_tssa(w, temp, bias)[0]
    if rival == NAIVE:
        return lambda w, temp, bias: causal_tssa(w, temp, bias, backend="naive")[0]
    if rival == DELTA:
        return delta_of_layer
    if rival == SOFTMAX:
        return lambda *qkv: scaled_dot_product_attention(*qkv, is_causal=True)

    def formulas(w: Tensor, temp_H: Tensor, bias_HT: Tensor) -> Tensor:
        state = TssaState.empty(len(w), *w.shape[2:], like=w)
        return naive.causal_tssa(w, temp_H, bias_HT.T, "energy-share", state)[0]

    return torch.compile(formulas, dynamic=True)


def delta_of_layer(
    value: Tensor, key: Tensor, query: Tensor, weight: Tensor, step: Tensor, beta: Tensor, log_rate_H: Tensor
) -> Tensor:
    """The operator of a D layer, between its projections, without norm and gate."""
    local = LocalDocuments.of(None, value.shape[0], value.shape[1], None)
    value, key, query = (
        silu(short_conv(x.flatten(-2), taps, local=local)[0]).view_as(x)
        for x, taps in zip((value, key, query), weight, strict=True)
    )
    log_decay = -log_rate_H.exp() * softplus(step)
    query, key = unit_length(query, scale=query.shape[-1] ** -0.5), unit_length(key)
    return delta_rule(query, key, value, log_decay, beta.sigmoid(), local=local)[0]


def prepared(
    rival: str,
    *,
    device: str,
    tokens: int,
    run: Callable[..., Tensor] | None = None,
    batch: int,
    heads: int,
    channels: int,
    dtype: str,
    work: str,
) -> Callable[[], None]:
    """The measured call; its inputs exist before it. `run` is a rival that is compiled already."""
    run = run or _operator(rival)
    torch.manual_seed(0)
    make = lambda *shape: torch.randn(*shape, device=device, dtype=getattr(torch, dtype))
    if rival == SOFTMAX:
        inputs = [make(batch, heads, tokens, channels) for _ in range(3)]
    elif rival == DELTA:
        log_rate, step_bias = (x.to(device, torch.float32) for x in initial_decays(heads))
        inputs = [make(batch, tokens, heads, channels) for _ in range(3)]
        inputs += [make(3, heads * channels, CONV_TAPS), make(batch, tokens, heads) + step_bias]
        inputs += [make(batch, tokens, heads), log_rate]
    else:
        # Initial values of temp and bias in a model.
        w = make(batch, tokens, heads, channels)
        inputs = [w, w.new_ones(heads), w.new_zeros(heads, tokens)]
    return called(run, inputs, work)


def called(run: Callable[..., Tensor], inputs: list[Tensor], work: str) -> Callable[[], None]:
    """A call of `run` on the inputs, of which the first is as large as the output; with gradients or without."""
    if work == FORWARD:

        def call() -> None:
            with torch.no_grad():
                run(*inputs)

        return call
    leaves = [x.requires_grad_() for x in inputs]
    dy = torch.randn_like(inputs[0])

    def call_and_backward() -> None:
        run(*leaves).backward(dy)
        for x in leaves:
            x.grad = None

    return call_and_backward
