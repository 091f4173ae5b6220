"""One part of `benchmarks.gpu`:

    python -m benchmarks.gpu_parts PART CELLS DEVICE

It appends to the file CELLS a line of JSON with the machine, then one for each cell: `case`, its texts `value` and
`beside` for the table or `failed`, and what was measured. Tracebacks are printed at SIGINT and when a signal ends it.
"""

import gc
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from itertools import cycle, takewhile
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from xml.etree import ElementTree

import torch
from torch.cuda import nccl

from benchmarks import measure
from benchmarks.engine import engine_of, packed_batches
from benchmarks.gpu_two_ranks import SHOW_S, two_ranks
from benchmarks.gpu_warm_up import compile_kernels
from benchmarks.measure import in_units, interleaved_seconds, median_seconds, peak_extra_bytes
from benchmarks.operator import copy_bandwidth
from benchmarks.plain import block as plain_block
from benchmarks.plain import plain_loop, plain_loss
from tost_lm.config import validate
from tost_lm.data.prefetch import MicroBatch
from tost_lm.errors import ConfigError, TostError
from tost_lm.inference.decoding import decoder
from tost_lm.mixers.delta import fla
from tost_lm.mixers.delta.settings import DeltaSizes
from tost_lm.model import ModelConfig, TostLM
from tost_lm.model.flops import flops_per_token, peak_flops
from tost_lm.model.streaming import prefill
from tost_lm.model.transforms import compile_blocks
from tost_lm.optim.settings import OptimConfig
from tost_lm.parallel.graceful_stop import GracefulStop, StopOfRanks
from tost_lm.pretrain.step import Outcome, train_step
from tost_lm.pretrain.tiled import tile
from tost_lm.testing import FLOAT32_REORDERED, assert_as_accurate, assert_close

Cells = Iterator[dict[str, Any]]
Kernels = list[tuple[str, float, int]]
"""Name, seconds and calls of each kernel of a call; on a CPU, of each of torch's operations."""


class PackedSizes(NamedTuple):
    """A step on packed documents."""

    micro_batches: int
    rows: int
    tokens: int


class Sizes(NamedTuple):
    """Sizes of the measured calls. On a CPU, `shape` replaces that of the presets."""

    rows: int
    tokens: int
    delta: PackedSizes
    delta_large: PackedSizes
    decoded: int
    shape: dict[str, Any]


SIZES = {  # those of the recipes on 8 GPUs
    "cuda": Sizes(60, 1024, PackedSizes(2, 8, 4096), PackedSizes(16, 2, 8192), 64, {}),
    "cpu": Sizes(
        4, 64, PackedSizes(2, 2, 128), PackedSizes(2, 1, 256), 2,
        {"layers": 4, "heads": 8, "width": 64, "vocab_size": 256},
    ),
}  # fmt: skip
LAUNCHES, PRODUCTS_QUEUED = 2000, 10
STEPS = 3
PACKED_BATCHES = 8
MAX_POSITIONS = 16_384
"""Positions of the decoding model, more than its measurement takes."""
CLASSES = {
    "copies and fills": r"^Mem|aten::(copy_|zero_|fill_|clone)",
    "norms and pointwise, compiled": r"^triton_|cpp_fused",
    "attention": r"flash|fmha|attention",
    "loss": r"^loss_kernel|cross_entropy|CrossEntropy|nll_loss|log_softmax|SoftMax",
    "matrix products": r"nvjet|gem[mv]|cutlass|xmma|splitK|aten::(addmm|mm|bmm|baddbmm)",
    "token mixers": r"^\w+_kernel\w*$|tost_lm::|CausalTssa",
    "norms and pointwise": r"at::native|aten::",
}
"""Kernels by the first expression that is in their name. Those after the last backward are `optimizer`."""


def demo(device: str) -> Cells:
    """The commands of `make demo` up to its first report, as a reader types them; one that fails is the last."""
    commands = re.findall(r"^\t\$\(BIN\)/tost (.+)$", (measure.CHECKOUT / "Makefile").read_text(), re.MULTILINE)
    with tempfile.TemporaryDirectory(prefix="tost_lm_bench_") as folder:
        Path(folder, "configs").symlink_to(measure.CHECKOUT / "configs")
        for words in takewhile(lambda words: words[0] != "report", map(shlex.split, commands)):
            small = ["run.device=cpu", "train.steps=2"] if device == "cpu" and words[0] == "train" else []
            began, command = time.monotonic(), [sys.executable, "-P", "-m", "tost_lm.cli.main", *words, *small]
            done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            print(done.stdout, flush=True)
            last = (done.stdout.strip().splitlines() or ["no output"])[-1]
            failed = {"failed": last} if done.returncode else {}
            value = f"{time.monotonic() - began:.0f} s"
            yield {"case": shlex.join(["tost", *words]), "value": value, "beside": last, **failed}
            if failed:
                return


def device_rates(device: str) -> Cells:
    """Versions; bandwidth of a copy; the time in which the host launches an operation; rates of matrix products."""
    packages = ("torch", "triton", "fla-core", "deepspeed", "megatron-core")
    versions = {name: _version(name) for name in packages}
    if device == "cuda":
        versions |= {"CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, nccl.version()))}
    names = ", ".join(f"{name} {version}" for name, version in versions.items())
    yield {"case": "versions", "value": names, "beside": f"Python {sys.version.split()[0]}", "versions": versions}
    x = torch.zeros(1, device=device)
    seconds = median_seconds(lambda: [x.add_(1) for _ in range(LAUNCHES)], device) / LAUNCHES
    yield {"case": "launch of an operation", "value": f"{1e6 * seconds:.2f} µs", "seconds": seconds}
    copied = copy_bandwidth(device)
    value = f"{copied['bytes_per_second'] / 1e9:,.0f} GB/s"
    yield {"case": "copy", "value": value, "beside": "read and written", **copied}
    yield _products("matrix products of a layer, queued", _products_of_layers(device), device)
    if device == "cuda":
        a, b = torch.randn(2, 8192, 8192, device=device, dtype=torch.bfloat16)
        yield _products("square matrix products, queued", [(a, b)], device)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _products_of_layers(device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The matrix products of a layer of tost-base at the recipe's size: forward, and the gradients of both factors."""
    sizes, width = SIZES[device], _model(device, "tost-base").width
    make = partial(torch.randn, device=device, dtype=torch.bfloat16)
    M, products = sizes.rows * sizes.tokens, []
    for read, written in ((width, width), (width, width), (width, 4 * width), (4 * width, width)):
        x, y, weight = make(M, read), make(M, written), make(written, read)
        products += [(x, weight.T), (y, weight), (y.T, x)]
    return products


def _products(case: str, factors: list[tuple[torch.Tensor, torch.Tensor]], device: str) -> dict[str, Any]:
    """All are enqueued before one wait: a single product between two events takes longer, since it starts late."""

    def queue() -> None:
        for a, b in PRODUCTS_QUEUED * factors:
            torch.mm(a, b)

    flops = PRODUCTS_QUEUED * sum(2 * a.shape[0] * a.shape[1] * b.shape[1] for a, b in factors)
    rate = flops / median_seconds(queue, device)
    of_peak = _of_peak(rate, device)
    beside = "peak unknown" if of_peak is None else f"{of_peak:.0%} of the published peak"
    value = f"{rate / 1e12:.4g} TFLOP/s"
    return {"case": case, "value": value, "beside": beside, "flops_per_second": rate, "of_peak": of_peak}


def training_step(device: str) -> Cells:
    """The step of owt_tost_base, eager and compiled, and the losses of both against those in float32.

    LayerScale is 1, so that losses depend on the blocks; times do not depend on it. Gradient norms are not compared: a
    few first tokens of documents with small projections dominate them, and rounding to bfloat16 changes those.
    """
    sizes = SIZES[device]
    settings = _model(device, "tost-base", layer_scale=1.0)
    batches = [_batch(sizes.rows, sizes.tokens, settings, device, seed) for seed in range(STEPS)]
    losses = {}
    for how in ("eager", "compiled", "float32"):
        step = Step(settings, batches, device, bfloat16=how != "float32", compiled=how == "compiled")
        losses[how] = torch.tensor([step().loss for _ in range(STEPS)])
        if how != "float32":
            yield step.measured(f"tost-base, {sizes.rows} × {sizes.tokens:,} tokens, {how}", sizes.tokens)
        del step
        free_memory(device)
    eager, compiled, exact = (losses[how] for how in ("eager", "compiled", "float32"))
    errors = [float((x - exact).norm() / exact.norm()) for x in (compiled, eager)]
    yield {
        "case": f"losses of {STEPS} compiled steps", "value": f"error {errors[0]:.2e}",
        "beside": f"{errors[1]:.2e} eager, both against float32",
        "found": {how: found.tolist() for how, found in losses.items()},
        **_failure(partial(assert_as_accurate, compiled, eager, exact, "losses")),
    }  # fmt: skip


def delta_step(device: str) -> Cells:
    """The compiled steps of delta_350m and of the first stage of delta_1b_8k_128k; then a plain loop with the former's
    heads, whose kernels are tuned by now."""
    sizes = SIZES[device]
    for preset, step in (("delta-350m", sizes.delta), ("delta-1b", sizes.delta_large)):
        settings = _model(device, preset)
        if device == "cuda":
            compile_kernels(preset)
        if missing := _missing_kernels(settings, device):
            yield {"case": preset, "failed": f"not tried: {missing}"}
            continue
        yield packed_step(preset, settings, step, device)
        free_memory(device)
    settings = _model(device, "delta-350m")
    if not _missing_kernels(settings, device):
        of_delta = {name: getattr(settings, name) for name in ("pattern", "heads", "width")}
        yield beside_plain_loop(device, sizes.delta.rows, sizes.delta.tokens, **of_delta)


def packed_step(case: str, settings: ModelConfig, sizes: PackedSizes, device: str) -> dict[str, Any]:
    """A compiled step on packed documents, each time others."""
    micro_batches, rows, tokens = sizes
    batches = packed_batches(PACKED_BATCHES, rows, tokens, settings.vocab_size, device)
    step = Step(settings, batches, device, micro_batches, bfloat16=True, compiled=True)
    step()
    return step.measured(f"{case}, {micro_batches} × {rows} × {tokens:,} packed tokens, compiled", tokens)


class Step:
    """Steps of some micro-batches each, in turns, as `tost train` makes them."""

    def __init__(
        self, settings: ModelConfig, batches: Sequence[MicroBatch], device: str, micro_batches: int = 1, *,
        bfloat16: bool, compiled: bool,
    ) -> None:  # fmt: skip
        self.settings, self.device, self.tokens = settings, device, micro_batches * batches[0].tokens.numel()
        self._engine = engine_of(
            settings, device, bfloat16=bfloat16, accumulation=micro_batches,
            prepare=compile_blocks if compiled else lambda model: None,
        )  # fmt: skip
        self._micro_batches, self._turn = micro_batches, cycle(batches)
        self._tiling = tile(self._engine.mesh, batches[0].tokens.shape[1])
        self._stop = StopOfRanks(GracefulStop(), 1, lambda: 0.0)

    def __call__(self, before_update: Callable[[], None] = lambda: None) -> Outcome:
        batches, lr = [next(self._turn) for _ in range(self._micro_batches)], OptimConfig().lr
        return train_step(self._engine, batches, self._tiling, lr, before_update=before_update, stop=self._stop)

    def measured(self, case: str, tokens: int) -> dict[str, Any]:
        """A cell with time, MFU, memory and all kernels, after a first step; `tokens` are those of a sequence."""
        seconds, peak = median_seconds(self, self.device), peak_extra_bytes(self, self.device)
        in_passes, in_update, waits = kernels_of_step(self, self.device)
        classes = by_class(in_passes) | {"optimizer": _sums(in_update)}
        kernels = [*in_passes, *in_update]
        copies = sum(calls for name, _, calls in kernels if name.startswith("Mem"))
        busy, calls = _sums(kernels)
        mfu = _of_peak(flops_per_token(self.settings, tokens).total * self.tokens / seconds, self.device)
        return {
            "case": case,
            "value": f"{_ms(seconds)}, {self.tokens / seconds:,.0f} tokens/s",
            "beside": f"{'MFU unknown' if mfu is None else f'MFU {mfu:.1%}'}; kernels {_ms(busy)} in "
            f"{calls - copies:,} launches and {copies:,} copies; {in_units(peak)} more memory",
            "seconds": seconds, "tokens": self.tokens, "peak_bytes": peak, "mfu": mfu, "kernel_seconds": busy,
            "launches": calls - copies, "copies": copies, "classes": classes, "kernels": kernels, "waits": waits,
        }  # fmt: skip


def kernels_of_step(
    step: Callable[[Callable[[], None]], object], device: str
) -> tuple[Kernels, Kernels, dict[str, float]]:
    """Those of the forward and backward, those of the update, and the waits in the forward and backward."""
    passes, update = profiler(device), profiler(device)

    def before_update() -> None:
        stop(passes, device)
        update.start()

    passes.start()
    step(before_update)
    stop(update, device)
    return kernels_in(passes, device), kernels_in(update, device), waits_in(passes)


def profiler(device: str) -> torch.profiler.profile:
    activity = torch.profiler.ProfilerActivity
    return torch.profiler.profile(activities=[activity.CUDA if device == "cuda" else activity.CPU])


def stop(profile: torch.profiler.profile, device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
    profile.stop()


def kernels_in(profile: torch.profiler.profile, device: str) -> Kernels:
    """The longest first."""
    events = [event for event in profile.key_averages() if event.device_type.name == device.upper()]
    seconds = lambda event: (event.self_device_time_total if device == "cuda" else event.self_cpu_time_total) / 1e6
    return sorted(((event.key, seconds(event), event.count) for event in events), key=lambda kernel: -kernel[1])


def by_class(kernels: Kernels) -> dict[str, tuple[float, int]]:
    """Seconds and calls of each class of `CLASSES`, and of the kernels in none: all kernels are counted, once."""
    of_class: dict[str, Kernels] = {name: [] for name in [*CLASSES, "others"]}
    for kernel in kernels:
        of_class[class_of(kernel[0])].append(kernel)
    return {name: _sums(found) for name, found in of_class.items() if found}


def class_of(kernel: str) -> str:
    return next((name for name, words in CLASSES.items() if re.search(words, kernel)), "others")


def waits_in(profile: Any) -> dict[str, float]:
    """Seconds in which the GPU computed nothing before a kernel of each class: the host was too slow."""
    events = [event for event in profile.events() if event.device_type.name == "CUDA"]
    spans = sorted((event.time_range.start, event.time_range.end, event.name) for event in events)
    waits, done = defaultdict[str, float](float), math.inf
    for start, end, name in spans:
        waits[class_of(name)] += max(0, start - done) / 1e6
        done = end if math.isinf(done) else max(done, end)
    return dict(waits)


def _sums(kernels: Kernels) -> tuple[float, int]:
    return sum(busy for _, busy, _ in kernels), sum(calls for *_, calls in kernels)


def plain_loops(device: str) -> Cells:
    """A step of softmax attention; `delta_step` has that of delta layers."""
    sizes = SIZES[device]
    rows = max(1, sizes.rows // 4)  # the plain loop keeps all logits
    yield beside_plain_loop(
        device, rows, sizes.tokens, pattern="A", heads=max(1, _model(device, "gpt2-base").width // 128)
    )


def beside_plain_loop(device: str, rows: int, tokens: int, **shape: Any) -> dict[str, Any]:
    """Steps of ours and of a plain PyTorch loop, both compiled, in turns."""
    settings = _model(device, "gpt2-base", layer_scale=1.0, softmax={"rope_theta": 1e4}, max_positions=tokens, **shape)
    batch = _batch(rows, tokens, settings, device)
    ours = Step(settings, [batch], device, bfloat16=device == "cuda", compiled=True)
    plain = partial(plain_loop(settings, device), partial(plain_loss, block=torch.compile(plain_block)), batch)
    losses = [ours().loss, float(plain())]
    seconds = interleaved_seconds({"ours": ours, "plain": plain}, device, budget_s=10)
    del ours, plain
    free_memory(device)
    return {
        "case": f"{settings.pattern}, {rows} × {tokens:,} tokens",
        "value": f"{median(seconds['ours']) / median(seconds['plain']):.2f} × the time of a plain loop",
        "beside": f"{_ms(median(seconds['ours']))}; first losses {losses[0]:.4f} and {losses[1]:.4f}",
        "seconds": seconds, "losses": losses,
        **_failure(partial(_require_equal, device, *losses)),
    }  # fmt: skip


def _require_equal(device: str, ours: float, theirs: float) -> None:
    """Equal within one rounding of what the loops compute in."""
    relative = torch.finfo(torch.bfloat16).eps if device == "cuda" else FLOAT32_REORDERED
    assert_close(torch.tensor(ours), torch.tensor(theirs), relative, "the first loss")


def decoding(device: str) -> Cells:
    """One token at a time for one sequence. A way to decode is a line of `ways`."""
    sizes = SIZES[device]
    prompt = sizes.tokens - 1
    model = TostLM(_model(device, "tost-base", max_positions=MAX_POSITIONS)).to(device, torch.bfloat16).eval()
    state = prefill(model, [torch.randint(model.config.vocab_size, (1, prompt), device=device)]).state
    assert state is not None
    step, token_1 = decoder(model, state), torch.zeros(1, dtype=torch.int64, device=device)

    @torch.inference_mode()
    def eager() -> torch.Tensor:
        return model(token_1[:, None], state=state).logits

    in_place = "as a graph" if device == "cuda" else "in place"
    ways: dict[str, Callable[[], object]] = {"eager": eager, in_place: lambda: step(token_1)}
    for name, call in ways.items():
        seconds = median_seconds(lambda call=call: [call() for _ in range(sizes.decoded)], device) / sizes.decoded
        profile = profiler(device)
        profile.start()
        call()
        stop(profile, device)
        busy, calls = _sums(kernels_in(profile, device))
        yield {
            "case": f"tost-base, a token after {prompt:,}, {name}", "value": _ms(seconds),
            "beside": f"kernels {_ms(busy)} in {calls:,} calls", "seconds": seconds, "kernel_seconds": busy,
            "launches": calls,
        }  # fmt: skip


def gpu_tests(device: str) -> Cells:
    """Those that failed or did not finish on a GPU before, then all others that a GPU runs in another way."""
    resumed, waits = "tests/gpu/test_resumed_gpu.py", "tests/gpu/test_waits_gpu.py"
    cell = run_tests([resumed])
    yield cell
    if "failed" in cell:
        yield run_tests([resumed], CUDA_LAUNCH_BLOCKING="1")
    soon = ["-o", "timeout=60"]  # a test that hangs ends with its traceback
    yield run_tests([waits, *soon])
    others = ["tests/gpu", *soon, f"--ignore={resumed}", f"--ignore={waits}"]
    if device == "cuda":
        others += ["tests/unit/ops/test_cross_entropy_triton.py"]
        others += ["-n", "8"] if find_spec("xdist") else []
    yield run_tests(others)


def run_tests(words: list[str], **environment: str) -> dict[str, Any]:
    """A cell with the counts of pytest, which prints its output here."""
    case = " ".join([*(f"{name}={value}" for name, value in environment.items()), *words])
    with tempfile.TemporaryDirectory(prefix="tost_lm_bench_") as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-vv", "--tb=short", f"--junitxml={report}", *words]
        process = subprocess.Popen(command, cwd=measure.CHECKOUT, env={**os.environ, **environment})
        try:
            code = process.wait()
        finally:  # at SIGINT pytest, which gets it too, prints its traceback
            with suppress(subprocess.TimeoutExpired):
                process.wait(SHOW_S)
        if not report.is_file():
            return {"case": case, "failed": f"pytest ended with {code}"}
        suite = ElementTree.parse(report).getroot().find("testsuite")
        assert suite is not None
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    names = [
        test.get("name", "") for test in suite.iter("testcase") if len(test) and test[0].tag in ("failure", "error")
    ]
    text = ", ".join(f"{number} {name}" for name, number in counts.items() if number or name == "tests")
    cell = {"case": case, "value": text, "beside": f"{float(suite.get('time', 0)):.0f} s", "counts": counts}
    return cell | ({"failed": f"{text}: {'; '.join(names)}"} if names else {})


MEASUREMENTS: dict[str, Callable[[str], Cells]] = {
    "demo": demo, "device": device_rates, "training step": training_step, "two ranks": two_ranks,
    "plain loop": plain_loops, "decoding": decoding, "tests": gpu_tests, "delta step": delta_step,
}  # fmt: skip


def free_memory(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _model(device: str, preset: str, **others: Any) -> ModelConfig:
    return validate(ModelConfig, {"preset": preset, **SIZES[device].shape, **others}, "benchmarks.gpu")


def _missing_kernels(settings: ModelConfig, device: str) -> str | None:
    """Why D layers would not train with the kernels of fla-core."""
    return fla.missing_in_training(torch.device(device), DeltaSizes.of(settings.shape_of("D")))


def _batch(rows: int, tokens: int, settings: ModelConfig, device: str, seed: int = 0) -> MicroBatch:
    generator = torch.Generator(device).manual_seed(seed)
    windows = torch.randint(settings.vocab_size, (rows, tokens + 1), device=device, generator=generator)
    return MicroBatch(windows[:, :-1], windows[:, 1:])


def _failure(check: Callable[[], object]) -> dict[str, str]:
    """`failed` with the message of an assertion, if it does not hold."""
    try:
        check()
    except AssertionError as error:
        return {"failed": str(error)}
    return {}


def _of_peak(flops_per_second: float, device: str) -> float | None:
    """The fraction of the published peak; None where it is unknown."""
    peak = peak_flops(torch.cuda.get_device_name(), "bfloat16") if device == "cuda" else None
    return flops_per_second / peak if peak else None


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3g} ms"


def main(part: str, cells: str, device: str) -> None:
    measure.print_tracebacks()
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("gpu.device = cuda: torch finds no CUDA device; set gpu.device=cpu to try the program")
    measure.append_cell(cells, measure.machine(device))
    for cell in MEASUREMENTS[part](device):
        measure.append_cell(cells, {"value": "", "beside": "", **cell, "time": measure.now()})


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except TostError as error:
        sys.exit(f"error: {error}")
