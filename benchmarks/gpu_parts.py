"""The measurements of `benchmarks.gpu`, in the order in which they run, and their lines in the table.

A part yields cells, dicts of plain values with a `case`. Beside it stands the function that describes a cell in two
texts: the value, and what it is compared with.
"""

import gc
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import long_cells, loss_cells, model_cells, operator_cells, precision_cells
from benchmarks.engine import engine_of, uses_deepspeed
from benchmarks.loss import OURS as OUR_LOSS
from benchmarks.loss import WHOLE as WHOLE_LOGITS
from benchmarks.measure import CHECKOUT, in_units, median_seconds, peak_extra_bytes
from benchmarks.operator import BOTH, FORWARD, OURS, SIZES_MOVED, SOFTMAX
from tost_lm.config import validate
from tost_lm.data.collation import MicroBatch
from tost_lm.model import ModelConfig
from tost_lm.model.flops import flops_per_token, peak_flops
from tost_lm.optim.config import OptimConfig
from tost_lm.training.step import train_step
from tost_lm.training.tiled import tile

if TYPE_CHECKING:
    from benchmarks.gpu import GpuBenchmarkConfig

Cells = Iterator[dict[str, Any]]
LAYER_SCALES = [1e-5, 1e-4, 1e-3, 1e-2]
LAUNCHES = 2000
SLOW_S = 20
TEST_SECONDS = 240
TOP_KERNELS = 8
DTYPES = {"cuda": "bfloat16", "cpu": "float32"}


def device_rates(config: "GpuBenchmarkConfig", device: str) -> Cells:
    """Bandwidth of a copy, rates of matrix products, and the time in which the host launches an operation."""
    yield {"case": "copy", **operator_cells.copy_bandwidth(device)}
    dtype, width = getattr(torch, DTYPES[device]), config.shape.width
    shapes = {"square matrix product": (8192, 8192, 8192)} if device == "cuda" else {}
    shapes["matrix product of an MLP"] = (config.lengths.batch_tokens, width, 4 * width)
    for case, (m, k, n) in shapes.items():
        a, b = (torch.randn(size, device=device, dtype=dtype) for size in ((m, k), (k, n)))
        rate = 2 * m * k * n / median_seconds(lambda a=a, b=b: a @ b, device)
        yield {"case": case, "flops_per_second": rate, "of_peak": _of_peak(rate, device)}
    x = torch.zeros(1, device=device)
    launches = lambda: [x.add_(1) for _ in range(LAUNCHES)]
    yield {"case": "launch of an operation", "seconds": median_seconds(launches, device) / LAUNCHES}


def describe_rate(cell: Mapping[str, Any]) -> tuple[str, str]:
    if "bytes_per_second" in cell:
        return f"{cell['bytes_per_second'] / 1e9:,.0f} GB/s", "read and written"
    if "seconds" in cell:
        return f"{1e6 * cell['seconds']:.2f} µs", ""
    return f"{cell['flops_per_second'] / 1e12:.4g} TFLOP/s", _percent_of_peak(cell["of_peak"])


def operator(config: "GpuBenchmarkConfig", device: str) -> Cells:
    """The operator at each length, then its rivals; a rival that is too slow is not tried at a longer length."""
    copied = operator_cells.copy_bandwidth(device)["bytes_per_second"]
    rivals: dict[str, Callable[..., Callable[[], None]]] = {
        OURS: operator_cells.prepared,
        SOFTMAX: operator_cells.prepared,
        **_linear_attention(device),
    }
    for rival, prepare in rivals.items():
        row_seconds = {FORWARD: 0.0, BOTH: 0.0}  # at the shortest length, of rivals in quadratic time
        for tokens in sorted(config.lengths.operator):
            rows = max(1, config.lengths.batch_tokens // tokens)
            shape = {"batch": rows, "heads": config.shape.heads, "channels": config.shape.width // config.shape.heads}
            for work in (FORWARD, BOTH):
                case = f"{rival}, {rows} × {tokens:,} tokens, {work}"
                if row_seconds[work] * (tokens / min(config.lengths.operator)) ** 2 > SLOW_S:
                    yield {"case": case, "failed": f"not tried: would take over {SLOW_S} s"}
                    continue
                call = prepare(rival, device=device, tokens=tokens, dtype=DTYPES[device], work=work, **shape)
                seconds = median_seconds(call, device)
                if rival == SOFTMAX:
                    row_seconds[work] = row_seconds[work] or seconds / rows
                w_bytes = rows * tokens * config.shape.width * getattr(torch, DTYPES[device]).itemsize
                peak, floor = peak_extra_bytes(call, device) / w_bytes, SIZES_MOVED[work] * w_bytes / copied
                yield {"case": case, "seconds": seconds, "floor_seconds": floor, "peak_in_w": peak}


def describe_operator(cell: Mapping[str, Any]) -> tuple[str, str]:
    seconds, floor = cell["seconds"], cell["floor_seconds"]
    return _ms(
        seconds
    ), f"{seconds / floor:.2f} × the operator's floor {_ms(floor)}; {cell['peak_in_w']:.2f} w more memory"


def _linear_attention(device: str) -> dict[str, Callable[..., Callable[[], None]]]:
    """Calls of flash-linear-attention's chunked kernels, where the package is installed."""
    if device != "cuda" or find_spec("fla") is None:
        return {}
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.gla import chunk_gla

    def prepare(
        rival: str, *, device: str, tokens: int, dtype: str, work: str, batch: int, heads: int, channels: int
    ) -> Callable[[], None]:
        shape = (batch, tokens, heads, channels)
        q, k, v = (torch.randn(shape, device=device, dtype=getattr(torch, dtype)) for _ in range(3))
        if rival == "gated linear attention (fla)":
            inputs = [q, k, v, torch.rand_like(q, dtype=torch.float32).log_()]
            kernel: Any = chunk_gla
        else:
            gate = torch.rand(shape[:-1], device=device)
            inputs = [q, torch.nn.functional.normalize(k, dim=-1), v, gate.log(), gate.to(q.dtype)]
            kernel = chunk_gated_delta_rule
        return operator_cells.called(lambda *leaves: kernel(*leaves)[0], inputs, work)

    return dict.fromkeys(("gated linear attention (fla)", "gated delta rule (fla)"), prepare)


def operator_tests(config: "GpuBenchmarkConfig", device: str) -> Cells:
    """The operator's tests on the device, in processes of their own, several at once with pytest-xdist."""
    paths = ["tests/gpu", *(["tests/unit/model/test_gated.py"] if device == "cuda" and find_spec("fla") else [])]
    command = [sys.executable, "-m", "pytest", *paths, *(["-n", "8"] if find_spec("xdist") else [])]
    try:
        done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=TEST_SECONDS)
    except subprocess.TimeoutExpired:
        yield {"case": " ".join(paths), "failed": f"over {TEST_SECONDS} s"}
        return
    last = next((line for line in reversed(done.stdout.splitlines()) if re.match(r"\d+ \w+.* in ", line)), "")
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", last)}
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    yield {"case": " ".join(paths), "counts": counts, "failed_tests": failed, "exit_code": done.returncode}


def describe_tests(cell: Mapping[str, Any]) -> tuple[str, str]:
    counts = ", ".join(f"{number} {word}" for word, number in cell["counts"].items()) or "no test ran"
    return counts, "; ".join(cell["failed_tests"]) or f"exit code {cell['exit_code']}"


def loss(config: "GpuBenchmarkConfig", device: str) -> Cells:
    """From the head's input and weight to the gradients of both."""
    M, C, V = config.lengths.batch_tokens, config.shape.width, config.shape.vocab_size
    products = 6 * M * C * V
    for rival in (OUR_LOSS, WHOLE_LOGITS):
        call = loss_cells.prepared(rival, device, M, width=C, vocab_size=V, dtype=DTYPES[device], work=BOTH)
        seconds, peak = median_seconds(call, device), peak_extra_bytes(call, device)
        case = f"{rival}, {M:,} tokens, vocabulary {V:,}, {BOTH}"
        yield {"case": case, "seconds": seconds, "peak_bytes": peak, "of_peak": _of_peak(products / seconds, device)}


def describe_loss(cell: Mapping[str, Any]) -> tuple[str, str]:
    return _ms(cell["seconds"]), f"{in_units(cell['peak_bytes'])} more memory; {_percent_of_peak(cell['of_peak'])}"


def training(config: "GpuBenchmarkConfig", device: str) -> Cells:
    """A step of `tost train`, and its kernels."""
    for tokens in config.lengths.training:
        settings, rows = _model(config, max_positions=tokens), max(1, config.lengths.batch_tokens // tokens)
        engine = engine_of(settings, device, bfloat16=device == "cuda")
        windows = torch.randint(settings.vocab_size, (rows, tokens + 1), device=engine.mesh.device)
        batch = MicroBatch(windows[:, :-1], windows[:, 1:])
        step = partial(train_step, engine, [batch], tile(engine.mesh, tokens), OptimConfig().lr)
        seconds, peak = median_seconds(step, device), peak_extra_bytes(step, device)
        kernels = kernels_of(step, device)
        flops = flops_per_token(settings, tokens).total * rows * tokens
        case = f"{rows} × {tokens:,} tokens, {'DeepSpeed' if uses_deepspeed(engine) else 'plain loop'}"
        yield {
            "case": case, "seconds": seconds, "tokens": rows * tokens, "peak_bytes": peak,
            "mfu": _of_peak(flops / seconds, device), "launches": sum(count for _, _, count in kernels),
            "kernel_seconds": sum(time for _, time, _ in kernels),
        }  # fmt: skip
        for name, time, count in kernels[:TOP_KERNELS]:
            yield {"case": f"{tokens:,} tokens: {name[:60]}", "kernel_seconds": time, "calls": count, "step": seconds}
        del engine, step
        free_memory(device)


def describe_training(cell: Mapping[str, Any]) -> tuple[str, str]:
    kernels = _ms(cell["kernel_seconds"])
    if "calls" in cell:
        return kernels, f"{cell['calls']} calls, {cell['kernel_seconds'] / cell['step']:.1%} of the step"
    mfu = "MFU unknown" if cell["mfu"] is None else f"MFU {cell['mfu']:.1%}"
    return (
        f"{_ms(cell['seconds'])}, {cell['tokens'] / cell['seconds']:,.0f} tokens/s",
        f"{mfu}; kernels {kernels} in {cell['launches']:,} launches; {in_units(cell['peak_bytes'])} more memory",
    )


def precision(config: "GpuBenchmarkConfig", device: str) -> Cells:
    """bfloat16 against float32: the last hidden state of the model, then losses of a small one."""
    tokens = min(config.lengths.training)
    model = _model(config, max_positions=tokens).model_dump()
    for row in precision_cells.hidden_errors(device, model, LAYER_SCALES, tokens)["rows"]:
        yield {"case": f"last hidden state, LayerScale {row['layer_scale']:g}", **row}
    free_memory(device)
    small = {"layers": 4, "heads": 4, "width": min(256, config.shape.width), "vocab_size": 256, "max_positions": 256}
    steps = config.lengths.precision_steps
    train = {"steps": steps, "warmup_steps": min(20, steps // 2), "lr": 1e-3, "seq_len": 256, "batch": 8, "seed": 0}
    for dtype in ("float32", "bfloat16"):
        found = precision_cells.losses(device, small, {**train, "dtype": dtype})
        last = mean(found["losses"][-max(1, len(found["losses"]) // 10) :])
        yield {"case": f"loss after {steps} steps, {dtype}", "loss": last, **found}


def describe_precision(cell: Mapping[str, Any]) -> tuple[str, str]:
    if "error" in cell:
        return f"error {cell['error']:.2%}", "of what the blocks add"
    return f"{cell['loss']:.4f} nats", f"{in_units(cell['state_bytes'])} of weights and optimizer state"


def tiled(config: "GpuBenchmarkConfig", device: str) -> Cells:
    """A step on one long sequence, tile by tile."""
    unlimited = {"max_positions": 1, "positions": "sinusoidal", "denom_bias": "head"}
    model = _model(config, **unlimited).model_dump()
    step = long_cells.step_of(device, model, config.lengths.tile_tokens)
    step(2 * config.lengths.tile_tokens)
    for tokens in sorted(config.lengths.tiled):
        seconds: list[float] = []
        once = partial(median_seconds, partial(step, tokens), device, repeats=1, warm_up=False)
        peak = peak_extra_bytes(lambda once=once, seconds=seconds: seconds.append(once()), device)
        yield {"case": f"{tokens:,} tokens", "seconds": seconds[0], "tokens": tokens, "peak_bytes": peak}
    free_memory(device)


def describe_tiled(cell: Mapping[str, Any]) -> tuple[str, str]:
    rate = cell["tokens"] / cell["seconds"]
    return f"{cell['seconds']:.3g} s, {rate:,.0f} tokens/s", f"{in_units(cell['peak_bytes'])} more memory"


def decoding(config: "GpuBenchmarkConfig", device: str) -> Cells:
    """One token at a time for one sequence."""
    tokens = min(config.lengths.training)
    rival = {"settings": _model(config, max_positions=tokens + 1).model_dump(), "attention": None}
    call, _ = model_cells.decoding_call(device, tokens, DTYPES[device], rival)
    many = lambda: [call() for _ in range(config.lengths.decoded)]
    seconds = median_seconds(many, device) / config.lengths.decoded
    launches = sum(count for _, _, count in kernels_of(call, device))
    yield {"case": f"a token after {tokens:,}", "seconds": seconds, "launches": launches}


def describe_decoding(cell: Mapping[str, Any]) -> tuple[str, str]:
    return _ms(cell["seconds"]), f"{cell['launches']:,} launches"


PARTS: dict[str, tuple[Callable[..., Cells], Callable[[Mapping[str, Any]], tuple[str, str]]]] = {
    "device": (device_rates, describe_rate),
    "operator": (operator, describe_operator),
    "operator tests": (operator_tests, describe_tests),
    "loss": (loss, describe_loss),
    "training step": (training, describe_training),
    "bfloat16 against float32": (precision, describe_precision),
    "tile by tile": (tiled, describe_tiled),
    "decoding": (decoding, describe_decoding),
}


def kernels_of(call: Callable[[], object], device: str) -> list[tuple[str, float, int]]:
    """(name, seconds, calls) of the kernels of one call, the longest first; on a CPU, of torch's operations."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        call()
        if on_gpu:
            torch.cuda.synchronize()
    found = [
        (event.key, (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6, event.count)
        for event in profiler.key_averages()
        if event.device_type.name == device.upper()
    ]
    return sorted(found, key=lambda kernel: -kernel[1])


def free_memory(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _model(config: "GpuBenchmarkConfig", **others: Any) -> ModelConfig:
    return validate(ModelConfig, {**config.shape.model_dump(), "pattern": "T", **others}, "benchmarks.gpu")


def _of_peak(flops_per_second: float, device: str) -> float | None:
    """The fraction of the published peak; None where it is unknown."""
    peak = peak_flops(torch.cuda.get_device_name(), "bfloat16") if device == "cuda" else None
    return flops_per_second / peak if peak else None


def _percent_of_peak(of_peak: float | None) -> str:
    return "peak unknown" if of_peak is None else f"{of_peak:.0%} of the published peak"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3g} ms"
