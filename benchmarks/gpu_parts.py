"""The measurements of `benchmarks.gpu`, in the order in which they run, and their lines in the table.

A part yields cells, dicts of plain values with a `case`. Beside it stands the function that describes a cell in two
texts: the value, and what it is compared with.
"""

import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks import long_cells, loss_cells, model_cells, operator_cells, precision_cells
from benchmarks.engine import engine_of, packed_batches, uses_deepspeed
from benchmarks.gpu_settings import GpuBenchmarkConfig
from benchmarks.loss import OURS as OUR_LOSS
from benchmarks.loss import WHOLE as WHOLE_LOGITS
from benchmarks.measure import CHECKOUT, in_units, median_seconds, peak_extra_bytes, table_file
from benchmarks.operator import BOTH, FORWARD, OURS, SIZES_MOVED, SLOTS, SOFTMAX
from tost_lm.config import validate
from tost_lm.data.prefetch import MicroBatch
from tost_lm.mixers.delta import fla
from tost_lm.mixers.delta.facts import Sizes
from tost_lm.model import ModelConfig, TostLM
from tost_lm.model.config import PRESETS
from tost_lm.model.flops import flops_per_token, peak_flops
from tost_lm.model.transforms import compile_blocks
from tost_lm.optim.settings import OptimConfig
from tost_lm.pretrain.step import train_step
from tost_lm.pretrain.tiled import tile

Cells = Iterator[dict[str, Any]]
LAYER_SCALES = [1e-5, 1e-4, 1e-3, 1e-2]
LAUNCHES = 2000
SLOW_S = 20
SLOW_CALL_S = 2
TEST_SECONDS = 240
TOP_KERNELS = 8
PACKED_SAMPLES, PACKED_BATCHES = 16, 8
DTYPES = {"cuda": "bfloat16", "cpu": "float32"}


def device_rates(config: GpuBenchmarkConfig, device: str, deadline: float) -> Cells:
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


def operator(config: GpuBenchmarkConfig, device: str, deadline: float) -> Cells:
    """The operator at each length, then its rivals. Calls with little data run in the GPU's L2 cache."""
    yield from _at_each_length(config, device, dict.fromkeys((OURS, SLOTS, SOFTMAX), operator_cells.prepared))


def linear_attention(config: GpuBenchmarkConfig, device: str, deadline: float) -> Cells:
    """Kernels of flash-linear-attention, where it is installed. It tries many variants of each for a minute or more."""
    yield from _at_each_length(config, device, _linear_attention(device))


def _at_each_length(
    config: GpuBenchmarkConfig, device: str, rivals: Mapping[str, Callable[..., Callable[[], None]]]
) -> Cells:
    copied = operator_cells.copy_bandwidth(device)["bytes_per_second"]
    for rival, prepare in rivals.items():
        before: dict[str, tuple[int, float]] = {}  # tokens and seconds of a sequence at the previous length
        for tokens in sorted(config.lengths.operator):
            rows = max(1, config.lengths.batch_tokens // tokens)
            shape = {"batch": rows, "heads": config.shape.heads, "channels": config.shape.width // config.shape.heads}
            for work in (FORWARD, BOTH):
                case = f"{rival}, {rows} × {tokens:,} tokens, {work}"
                shorter, took = before.get(work, (tokens, 0.0))
                if rival == SOFTMAX and took * (tokens / shorter) ** 2 > SLOW_S:
                    yield {"case": case, "failed": f"not tried: would take over {SLOW_S} s"}
                    continue
                call = prepare(rival, device=device, tokens=tokens, dtype=DTYPES[device], work=work, **shape)
                seconds, peak = measured(call, device)
                kernels = kernels_of(call, device) if seconds < 1 else []
                before[work] = (tokens, seconds / rows)
                w_bytes = rows * tokens * config.shape.width * getattr(torch, DTYPES[device]).itemsize
                yield {
                    "case": case, "seconds": seconds, "floor_seconds": SIZES_MOVED[work] * w_bytes / copied,
                    "peak_in_w": peak / w_bytes, **in_all(kernels),
                }  # fmt: skip


def describe_operator(cell: Mapping[str, Any]) -> tuple[str, str]:
    seconds, floor = cell["seconds"], cell["floor_seconds"]
    ratio = f"{seconds / floor:.2f} × the operator's floor {_ms(floor)}"
    return _ms(seconds), f"{ratio}; {_kernels(cell)}; {cell['peak_in_w']:.2f} w more memory"


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


def softmax_layer(config: GpuBenchmarkConfig, device: str, deadline: float) -> Cells:
    """A softmax layer against its formula in float64 on the CPU."""
    tokens, heads = min(config.lengths.training), config.shape.heads
    documents = [3 * tokens // 16, tokens // 4 + 1, 9 * tokens // 16 + 1, tokens]  # of 1,024: 192, 65, 320 and 447
    window = {"window": tokens // 4}
    shared = {"qk_norm": True, "kv_heads": heads // 2 if heads % 2 == 0 else heads}
    for case, settings, ends in (
        ("all earlier tokens", {}, [tokens]),
        ("a window", window, [tokens]),
        ("a window, packed documents", window, documents),
        ("a window, packed documents, shared keys", {**window, **shared}, documents),
    ):
        model = {**config.shape.model_dump(), "softmax": settings}
        for row in precision_cells.softmax_errors(device, model, DTYPES[device], ends):
            yield {"case": f"{case}: {row['tensor']}, {DTYPES[device]}", **row}


def describe_softmax(cell: Mapping[str, Any]) -> tuple[str, str]:
    return f"error {cell['error']:.2e}", f"{cell['formula_error']:.2e} of the formula on this device"


def operator_tests(config: GpuBenchmarkConfig, device: str, deadline: float) -> Cells:
    """The operator's tests on the device, in processes of their own, several at once with pytest-xdist."""
    paths, options = ["tests/gpu"], ["-vv", "--tb=short", "--durations=5"]  # on a CPU, it skips them all
    if device == "cuda":
        paths += ["tests/unit/mixers/slots/test_slot_kernels.py", "tests/unit/ops/test_cross_entropy_triton.py"]
        options += ["-n", "8"] if find_spec("xdist") else []
    limit_s = max(1.0, min(TEST_SECONDS, deadline - time.monotonic()))
    output = table_file("gpu", device).with_suffix(".tests.txt")
    code = _run_tests([*paths, *options], limit_s, output)
    said = output.read_text(errors="replace")
    last = next((line for line in reversed(said.splitlines()) if re.search(r"\d+ \w+.* in [\d.]+s", line)), "")
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", last)}
    failed = re.findall(r"^(?:FAILED|ERROR) (.+)", said, re.MULTILINE)
    cell = {"case": " ".join(paths), "counts": counts, "failed_tests": failed, "exit_code": code, "output": str(output)}
    if code is None:
        ended = Counter(word.lower() for word in re.findall(r" (PASSED|FAILED|SKIPPED|ERROR) ", said))
        cell["failed"] = f"not finished after {limit_s:.0f} s: {_counted(ended)}; see {output}"
    yield cell


def _run_tests(words: list[str], limit_s: float, output: Path) -> int | None:
    """pytest's exit code, or None at the time limit. Its processes end with this call, however that ends."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("w") as file:
        command = [sys.executable, "-m", "pytest", *words]
        # Programs that tests start find the package where it is not installed.
        paths = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))
        process = subprocess.Popen(
            command, cwd=CHECKOUT, env={**os.environ, "PYTHONPATH": paths}, stdout=file, stderr=file,
            start_new_session=True,
        )  # fmt: skip
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def describe_tests(cell: Mapping[str, Any]) -> tuple[str, str]:
    return _counted(cell["counts"]), "; ".join(cell["failed_tests"]) or f"exit code {cell['exit_code']}"


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {word}" for word, number in counts.items()) or "no test ran"


def loss(config: GpuBenchmarkConfig, device: str, deadline: float) -> Cells:
    """From the head's input and weight to the gradients of both."""
    M, C, V = config.lengths.batch_tokens, config.shape.width, config.shape.vocab_size
    products = 6 * M * C * V
    for rival in (OUR_LOSS, WHOLE_LOGITS):
        call = loss_cells.prepared(rival, device, M, width=C, vocab_size=V, dtype=DTYPES[device], work=BOTH)
        seconds, peak = measured(call, device)
        case = f"{rival}, {M:,} tokens, vocabulary {V:,}, {BOTH}"
        yield {"case": case, "seconds": seconds, "peak_bytes": peak, "of_peak": _of_peak(products / seconds, device)}


def describe_loss(cell: Mapping[str, Any]) -> tuple[str, str]:
    return _ms(cell["seconds"]), f"{in_units(cell['peak_bytes'])} more memory; {_percent_of_peak(cell['of_peak'])}"


def training(config: GpuBenchmarkConfig, device: str, deadline: float) -> Cells:
    """A step of `tost train` of T layers, and its kernels."""
    for tokens in config.lengths.training:
        settings, rows = _model(config, max_positions=tokens), max(1, config.lengths.batch_tokens // tokens)
        windows = torch.randint(settings.vocab_size, (rows, tokens + 1), device=device)
        batch = MicroBatch(windows[:, :-1], windows[:, 1:])
        yield from _training_steps(f"{rows} × {tokens:,} tokens", settings, [batch], tokens, device)
        free_memory(device)


def packed_training(
    config: GpuBenchmarkConfig, device: str, deadline: float, prepare: Callable[[TostLM], object] = lambda model: None
) -> Cells:
    """A step of two hybrids on one GPU, each with other documents: slot memory with softmax attention in a window (the
    recipe owt_hybrid_base), and the gated delta rule with softmax attention to all earlier tokens."""
    tokens, heads = min(config.lengths.training), config.shape.heads
    for preset in ("hybrid-base", "delta-350m"):
        pattern = PRESETS[preset]["pattern"]
        layers = -(-config.shape.layers // len(pattern)) * len(pattern)
        shape = {**config.shape.model_dump(), "layers": layers, "softmax": {"kv_heads": heads}}
        settings = validate(ModelConfig, {"preset": preset, **shape}, "benchmarks.gpu")
        batches = packed_batches(PACKED_BATCHES, PACKED_SAMPLES, tokens, settings.vocab_size, device)
        documents = mean(len(batch.cu_seqlens) - 1 for batch in batches if batch.cu_seqlens is not None)
        case = f"{pattern}, {PACKED_SAMPLES} × {tokens:,} tokens, {documents:.0f} documents"
        sizes = Sizes.of(settings)
        missing = fla.missing_in_training(torch.device(device), sizes.key_size, sizes.value_size)
        if "D" in pattern and device == "cuda" and missing:
            yield {"case": case, "failed": f"not tried: {missing}"}
            continue
        yield from _training_steps(case, settings, batches, tokens, device, prepare)
        free_memory(device)


def _training_steps(
    case: str, settings: ModelConfig, batches: Sequence[MicroBatch], tokens: int, device: str,
    prepare: Callable[[TostLM], object] = lambda model: None,
) -> Cells:  # fmt: skip
    """Steps of one micro-batch each, in turns; `tokens` are those of a sequence."""
    engine = engine_of(settings, device, bfloat16=device == "cuda", prepare=prepare)
    count, turn, tiling = batches[0].tokens.numel(), cycle(batches), tile(engine.mesh, batches[0].tokens.shape[1])
    step = lambda: train_step(engine, [next(turn)], tiling, OptimConfig().lr)
    seconds, peak = measured(step, device)
    kernels = kernels_of(step, device)
    flops = flops_per_token(settings, tokens).total * count
    yield {
        "case": f"{case}, {'DeepSpeed' if uses_deepspeed(engine) else 'plain loop'}", "seconds": seconds,
        "tokens": count, "peak_bytes": peak, "mfu": _of_peak(flops / seconds, device), **in_all(kernels),
    }  # fmt: skip
    for name, busy, calls in kernels[:TOP_KERNELS]:
        short = name if len(name) < 100 else f"{name[:48]}…{name[-48:]}"
        yield {"case": f"{case}: {short}", "kernel": name, "kernel_seconds": busy, "calls": calls, "step": seconds}


def describe_training(cell: Mapping[str, Any]) -> tuple[str, str]:
    if "calls" in cell:
        busy = cell["kernel_seconds"]
        return _ms(busy), f"{cell['calls']} calls, {busy / cell['step']:.1%} of the step"
    mfu = "MFU unknown" if cell["mfu"] is None else f"MFU {cell['mfu']:.1%}"
    return (
        f"{_ms(cell['seconds'])}, {cell['tokens'] / cell['seconds']:,.0f} tokens/s",
        f"{mfu}; {_kernels(cell)}; {in_units(cell['peak_bytes'])} more memory",
    )


def precision(config: GpuBenchmarkConfig, device: str, deadline: float) -> Cells:
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


def tiled(config: GpuBenchmarkConfig, device: str, deadline: float) -> Cells:
    """A step on one long sequence, tile by tile."""
    unlimited = {"max_positions": 1, "positions": "sinusoidal", "tssa": {"denom_bias": "head"}}
    model = _model(config, **unlimited).model_dump()
    step = long_cells.step_of(device, model, config.lengths.tile_tokens)
    step(2 * config.lengths.tile_tokens)
    for tokens in sorted(config.lengths.tiled):
        seconds, peak = once(partial(step, tokens), device)
        yield {"case": f"{tokens:,} tokens", "seconds": seconds, "tokens": tokens, "peak_bytes": peak}
    free_memory(device)


def describe_tiled(cell: Mapping[str, Any]) -> tuple[str, str]:
    rate = cell["tokens"] / cell["seconds"]
    return f"{cell['seconds']:.3g} s, {rate:,.0f} tokens/s", f"{in_units(cell['peak_bytes'])} more memory"


def decoding(config: GpuBenchmarkConfig, device: str, deadline: float) -> Cells:
    """One token at a time for one sequence."""
    tokens = min(config.lengths.training)
    rival = {"settings": _model(config, max_positions=tokens + 1).model_dump(), "attention": None}
    call, _ = model_cells.decoding_call(device, tokens, DTYPES[device], rival)
    many = lambda: [call() for _ in range(config.lengths.decoded)]
    seconds = median_seconds(many, device) / config.lengths.decoded
    yield {"case": f"a token after {tokens:,}", "seconds": seconds, **in_all(kernels_of(call, device))}


def describe_decoding(cell: Mapping[str, Any]) -> tuple[str, str]:
    return _ms(cell["seconds"]), _kernels(cell)


MEASUREMENTS: dict[str, tuple[Callable[..., Cells], Callable[[Mapping[str, Any]], tuple[str, str]]]] = {
    "device": (device_rates, describe_rate),
    "softmax layer": (softmax_layer, describe_softmax),
    "operator": (operator, describe_operator),
    "packed training step": (packed_training, describe_training),
    "compiled training step": (partial(packed_training, prepare=compile_blocks), describe_training),
    "operator tests": (operator_tests, describe_tests),
    "training step": (training, describe_training),
    "loss": (loss, describe_loss),
    "bfloat16 against float32": (precision, describe_precision),
    "tile by tile": (tiled, describe_tiled),
    "decoding": (decoding, describe_decoding),
    "linear attention": (linear_attention, describe_operator),
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


def in_all(kernels: list[tuple[str, float, int]]) -> dict[str, Any]:
    """Seconds of the kernels, their launches, and copies and fills, which the host launches too."""
    copies = sum(count for name, _, count in kernels if name.startswith("Mem"))
    launches = sum(count for _, _, count in kernels) - copies
    return {"kernel_seconds": sum(busy for _, busy, _ in kernels), "launches": launches, "copies": copies}


def measured(call: Callable[[], object], device: str) -> tuple[float, int]:
    """Median seconds of a call, and its peak memory beyond what was held before; a slow call runs twice."""
    seconds, peak = once(call, device)
    if seconds >= SLOW_CALL_S:  # perhaps it has compiled
        seconds, peak = once(call, device)
    if seconds < SLOW_CALL_S:
        seconds, peak = median_seconds(call, device), peak_extra_bytes(call, device)
    return seconds, peak


def once(call: Callable[[], object], device: str) -> tuple[float, int]:
    seconds: list[float] = []
    timed = partial(median_seconds, call, device, repeats=1, warm_up=False)
    peak = peak_extra_bytes(lambda: seconds.append(timed()), device)
    return seconds[0], peak


def context_is_lost(device: str) -> bool:
    """Whether an error left the GPU unusable for this process."""
    if device == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return True
    return False


def free_memory(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _model(config: GpuBenchmarkConfig, **others: Any) -> ModelConfig:
    return validate(ModelConfig, {**config.shape.model_dump(), "pattern": "T", **others}, "benchmarks.gpu")


def _of_peak(flops_per_second: float, device: str) -> float | None:
    """The fraction of the published peak; None where it is unknown."""
    peak = peak_flops(torch.cuda.get_device_name(), "bfloat16") if device == "cuda" else None
    return flops_per_second / peak if peak else None


def _percent_of_peak(of_peak: float | None) -> str:
    return "peak unknown" if of_peak is None else f"{of_peak:.0%} of the published peak"


def _kernels(cell: Mapping[str, Any]) -> str:
    return f"kernels {_ms(cell['kernel_seconds'])} in {cell['launches']:,} launches and {cell['copies']:,} copies"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3g} ms"
