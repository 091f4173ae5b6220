"""Time, memory and bandwidth of token mixers and of their alternatives, by sequence length.

    python -m benchmarks.operator
    python -m benchmarks.operator "bench.lengths=[16384]" shape.heads=16

The gated delta rule is measured with its convolution and gates, as in a D layer of the same width. Rivals: the formulas
of TSSA as written under autograd ("naive", eager and under torch.compile), and causal softmax attention (torch's
scaled_dot_product_attention; flash attention where the device has it). Each runs forward and forward + backward, from
1k to 1M tokens as far as memory and bench.cell_seconds allow. Bandwidth is a fraction of that of a copy on the same
device; it counts the necessary traffic only: w and y forward, w, dy and dw backward (for the others their inputs and
gradients). On a CPU, TSSA is also timed beside a busy process, and the delta rule without its convolution beside its
matrix products alone and beside decays of channels. With the defaults it takes about 15 minutes on 2 CPU cores. Output:
one table, and all values in results/benchmarks/.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, softplus

from benchmarks import measure
from benchmarks.measure import call_seconds, interleaved_seconds, median_seconds, peak_extra_bytes
from benchmarks.plain import tssa_formulas
from tost_lm.command_line import run_program
from tost_lm.config import Section
from tost_lm.mixers.delta.layer import initial_decays, unit_length
from tost_lm.mixers.delta.operator import delta_rule
from tost_lm.mixers.delta.settings import CHUNK_TOKENS, CONV_TAPS, GROUP_CHUNKS, GROUP_ELEMENTS
from tost_lm.mixers.tssa.causal import causal_tssa
from tost_lm.ops.layout import LocalDocuments
from tost_lm.ops.short_conv import short_conv

OURS, DELTA = "causal TSSA", "gated delta rule"
NAIVE, COMPILED, SOFTMAX = "naive", "naive, compiled", "softmax attention"
RIVALS = (OURS, DELTA, NAIVE, COMPILED, SOFTMAX)
FORWARD, BOTH = "forward", "forward + backward"
BUSY = "forward + backward, beside a busy process"
PRODUCTS = "forward + backward, without convolution"
SIZES_MOVED = {FORWARD: 2, BOTH: 5}  # tensors of w's size that have to move: w, y; and w, dy, dw
SIZES_MOVED_BY_DELTA = {FORWARD: 4, BOTH: 11}  # q, k, v, y; and q, k, v, dy, dq, dk, dv
SIZES_MOVED_BY_SOFTMAX = {FORWARD: 4, BOTH: 12}  # q, k, v, y; and q, k, v, y, dy, dq, dk, dv


class ShapeConfig(Section):
    """Shape of w, [batch, tokens, heads, channels]."""

    batch: int = Field(default=1, gt=0)
    """Sequences."""
    heads: int = Field(default=12, gt=0)
    """Heads."""
    channels: int = Field(default=64, gt=0)
    """Channels of a head."""
    busy_tokens: int = Field(default=16384, gt=0)
    """Tokens of the calls beside a busy process and beside matrix products."""


class OperatorBenchmarkConfig(Section):
    """Settings of `benchmarks.operator`."""

    shape: ShapeConfig = Field(default_factory=ShapeConfig)
    bench: measure.BenchConfig = Field(default_factory=measure.BenchConfig)


def run(config: OperatorBenchmarkConfig, device: str) -> tuple[list[dict[str, Any]], str]:
    shape = config.shape.model_dump(exclude={"busy_tokens"})
    copy = measure.run_cell("benchmarks.operator:copy_bandwidth", device=device, limit_s=60)
    in_words = partial(described, copy["bytes_per_second"])
    rivals = {name: name for name in RIVALS}
    cells = measure.measure_table("benchmarks.operator", config.bench, (FORWARD, BOTH), rivals, in_words, **shape)
    dtype = config.bench.resolved_dtype()
    text = (
        f"{measure.markdown_table(table_rows(cells, in_words))}\n\n"
        f"w [{shape['batch']}, tokens, {shape['heads']}, {shape['channels']}] in {dtype}. Time; peak memory beyond the "
        f"inputs, in units of w; fraction of the bandwidth of a copy, {copy['bytes_per_second'] / 1e9:.1f} GB/s. Times "
        "are medians of rounds in which the rivals take turns; ¹: a single call, too slow for turns. –: failed at a "
        "shorter length."
    )
    if device == "cpu":
        call = {"device": device, "limit_s": config.bench.cell_seconds, "tokens": config.shape.busy_tokens}
        busy, products = (
            measure.run_cell(f"benchmarks.operator:{cell}", dtype=dtype, **call, **shape)
            for cell in ("beside_a_busy_process", "beside_its_products")
        )
        cells.append({"work": BUSY, "tokens": config.shape.busy_tokens, "rival": OURS, **busy})
        cells.append({"work": PRODUCTS, "tokens": config.shape.busy_tokens, "rival": DELTA, **products})
        text += f"\n\n{busy_line(cells[-2])}\n\n{products_line(cells[-1])}"
    return [{"work": "copy", **copy}, *cells], text


main = measure.benchmark("operator", run)


def busy_line(cell: Mapping[str, Any]) -> str:
    """How much another process slows the operator down."""
    if "failed" in cell:
        return f"{BUSY}: {cell['failed']}"
    quiet, busy = (median(cell[key]) for key in ("quiet_seconds", "seconds"))
    return (
        f"{OURS}, {cell['tokens']:,} tokens, {BUSY}: {1e3 * busy:,.3g} ms, {busy / quiet:.2f} × the quiet time, with "
        f"{cell['threads']} threads and {cell['wait_policy']} waiting."
    )


def products_line(cell: Mapping[str, Any]) -> str:
    """How much time the delta rule needs beyond that of its matrix products."""
    if "failed" in cell:
        return f"{PRODUCTS}: {cell['failed']}"
    products, whole, channels = (median(cell[key]) for key in ("product_seconds", "seconds", "channel_seconds"))
    return (
        f"{DELTA}, {cell['tokens']:,} tokens, {PRODUCTS}: {1e3 * whole:,.4g} ms, {whole / products:.2f} × the time of "
        f"its matrix products alone, {1e3 * products:,.4g} ms; with decays of channels {1e3 * channels:,.4g} ms, "
        f"{channels / whole:.2f} × the time."
    )


def table_rows(cells: Sequence[dict[str, Any]], in_words: Callable[[dict[str, Any]], str]) -> list[dict[str, str]]:
    """A row for each pass and length, a column for each rival, and the ratio of naive to ours."""
    rows: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for cell in cells:
        rows.setdefault((cell["work"], cell["tokens"]), {})[cell["rival"]] = cell
    return [
        {
            "": work,
            "tokens": f"{tokens:,}",
            **{name: in_words(cell) for name, cell in row.items()},
            f"{NAIVE} ÷ ours": _ratio(row[NAIVE], row[OURS]),
        }
        for (work, tokens), row in rows.items()
    ]


def described(copied_bytes_per_second: float, cell: Mapping[str, Any]) -> str:
    """Time, memory and bandwidth of a cell in a few words."""
    if "failed" in cell:
        return cell["failed"]
    once = "¹" if len(cell["seconds"]) == 1 else ""
    seconds, w_bytes = median(cell["seconds"]), cell["w_bytes"]
    sizes = {DELTA: SIZES_MOVED_BY_DELTA, SOFTMAX: SIZES_MOVED_BY_SOFTMAX}.get(cell["rival"], SIZES_MOVED)
    bandwidth = sizes[cell["work"]] * w_bytes / seconds / copied_bytes_per_second
    return f"{1e3 * seconds:,.3g} ms{once}, {cell['peak_bytes'] / w_bytes:.3g} w, {bandwidth:.0%}"


def _ratio(naive: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    if "failed" in naive or "failed" in ours:
        return "–"
    times = f"{median(naive['seconds']) / median(ours['seconds']):.3g} × time"
    if not ours["peak_bytes"]:  # too little to measure
        return times
    return f"{times}, {naive['peak_bytes'] / ours['peak_bytes']:.3g} × memory"


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
    """Seconds of forward + backward of the delta rule, of its matrix products, and with decays of channels."""
    make = lambda *shape: torch.randn(batch, tokens, heads, *shape, device=device, dtype=getattr(torch, dtype))
    inputs = [make(channels), unit_length(make(channels)), unit_length(make(channels)), -make().exp(), make().sigmoid()]
    of_channels = [*inputs[:3], -make(channels).exp(), inputs[4]]
    local = LocalDocuments.of(None, batch, tokens, None)

    def rule(value: Tensor, key: Tensor, query: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        return delta_rule(query, key, value, log_decay, beta, local=local)[0]

    calls = {
        "seconds": called(rule, inputs, BOTH),
        "channel_seconds": called(rule, of_channels, BOTH),
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
        return tssa_formulas
    if rival == DELTA:
        return delta_of_layer
    if rival == SOFTMAX:
        return lambda *qkv: scaled_dot_product_attention(*qkv, is_causal=True)

    return torch.compile(tssa_formulas, dynamic=True)


def delta_of_layer(
    value: Tensor, key: Tensor, query: Tensor, weight: Tensor, step: Tensor, beta: Tensor, log_rate_H: Tensor
) -> Tensor:
    """The operator of a D layer, between its projections, without norm and gate."""
    local = LocalDocuments.of(None, value.shape[0], value.shape[1], None)
    value, key, query = (
        short_conv(x.flatten(-2), taps, local=local, activated=True)[0].view_as(x)
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


if __name__ == "__main__":
    run_program(
        main, name="benchmarks.operator", doc=__doc__ or "", positional="[CONFIG]", config=OperatorBenchmarkConfig
    )
