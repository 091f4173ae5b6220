"""All GPU measurements in one command, most valuable first, each part in a process of its own.

    python -m benchmarks.gpu
    python -m benchmarks.gpu 'gpu.parts=["decoding"]'
    python -m benchmarks.gpu gpu.device=cpu

Steps are those of `tost train`, with its rates and losses; their kernels are in a trace. At its time limit a part gets
SIGINT, ten seconds later SIGKILL. Whatever ends it, its results so far and the end of its output are stored, and the
next part runs. It runs from a checkout with the packages in `NEEDED`; DeepSpeed, megatron-core and fla-core are used
where they can be imported. Output: a table and all values in results/benchmarks/, and the output of each part in
results/benchmarks/gpu/.
"""

import gzip
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any, Literal

NEEDED = ("torch", "triton", "numpy", "pytest", "safetensors", "xxhash", "sentencepiece", "psutil", "pydantic")
NEEDED += ("pydantic_core", "annotated_types", "typing_inspection")  # of pydantic

if __name__ == "__main__" and (missing := [name for name in NEEDED if find_spec(name) is None]):
    names, version = " ".join(missing), f"{sys.version_info.major}.{sys.version_info.minor}"
    print(
        f"error: packages are missing: {', '.join(missing)}; where there is an index, run pip download -d wheels "
        f"--only-binary=:all: --python-version {version} {names}, bring the folder here, and run pip install "
        f"--no-index --find-links wheels {names}",
        file=sys.stderr,
    )
    sys.exit(2)

import torch
from pydantic import Field
from torch.cuda import nccl

from benchmarks import measure
from benchmarks.measure import CHECKOUT, RESULTS, median_seconds, results_file
from benchmarks.plain import beside_plain_loop
from tost_lm.command_line import run_program
from tost_lm.config import Section, validate
from tost_lm.errors import ConfigError
from tost_lm.files import read_rows
from tost_lm.inference.decoding import decoder
from tost_lm.model import ModelConfig, TostLM
from tost_lm.model.flops import peak_flops
from tost_lm.model.streaming import prefill
from tost_lm.testing import assert_as_accurate

OUTPUTS = RESULTS / "gpu"
WORK = OUTPUTS / "work"  # of the commands; each run of this program makes it anew
GRACE_S, SHOW_S = 10.0, 2.5  # for a part, and for its commands, to print their tracebacks after SIGINT
LAUNCHES, PRODUCTS_QUEUED = 2000, 10
STEPS, TRACED = 3, 8
"""Steps whose losses are compared, and the traced step; the rates are those of the steps before it."""
TOST = (sys.executable, "-P", "-m", "tost_lm.cli.main")
MODELS = {  # recipe and settings of the measured steps, with the batch of one of 8 GPUs
    "tost-base": ("owt_tost_base", "parallel.engine=fsdp", "train.global_batch_size=60",
                  "model.layer_scale=1"),  # losses depend on the blocks
    "delta-350m": ("delta_350m", "train.global_batch_size=16"),
    "delta-1b": ("delta_350m", "model.preset=delta-1b", "train.seq_len=8192", "train.global_batch_size=32",
                 "train.micro_batch_size=2"),
}  # fmt: skip
SMALL_SHAPE = {"layers": 4, "heads": 8, "width": 64, "vocab_size": 2048}
SMALL = ("train.seq_len=64", "train.global_batch_size=4", "train.micro_batch_size=2")
"""Shape and batch on a CPU."""
LAYOUTS = {
    "one rank": "parallel.zero_stage=0", "ZeRO 1": "parallel.zero_stage=1", "ZeRO 2": "parallel.zero_stage=2",
    "ZeRO 3": "parallel.zero_stage=3", "tensor 2": "parallel.tensor=2", "sequence 2": "parallel.sequence=2",
}  # fmt: skip
CLASSES = {
    "copies and fills": r"^Mem|aten::(copy_|zero_|fill_|clone)",
    "norms and pointwise, compiled": r"^triton_|cpp_fused",
    "attention": r"flash|fmha|attention",
    "loss": r"^loss_kernel|cross_entropy|CrossEntropy|nll_loss|log_softmax|SoftMax",
    "matrix products": r"nvjet|gem[mv]|cutlass|xmma|splitK|aten::(addmm|mm|bmm|baddbmm)",
    "token mixers": r"^\w+_kernel\w*$|tost_lm::|CausalTssa",
    "norms and pointwise": r"at::native|aten::",
    "others": "",
}
"""Kernels by the first expression that is in their name. Those after the last backward are `optimizer`."""
COMPILERS = min(16, os.cpu_count() or 1)  # processes that compile the kernels of D layers
NO_FLA = "not tried: fla-core is not installed"
Cells = Iterator[dict[str, Any]]


def run(
    case: str, command: Sequence[str], folder: Path = WORK, ranks: Sequence[Mapping[str, object]] = ({},),
    during: Callable[[list[subprocess.Popen[bytes]]], object] = bool,
) -> dict[str, Any]:  # fmt: skip
    """A cell with the seconds of a command and its error or last line; `ranks` are environments of its processes."""
    began, output = time.monotonic(), WORK / f"{as_name(case)}.txt"
    with output.open("w") as file:
        start = partial(subprocess.Popen, command, cwd=folder, stdout=file, stderr=file)
        processes = [start(env=os.environ | {name: str(value) for name, value in of.items()}) for of in ranks]
    try:
        during(processes)
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:  # at SIGINT, which it gets too, it prints its traceback
            with suppress(subprocess.TimeoutExpired):
                process.wait(SHOW_S)
        lines = output.read_text(errors="replace").strip().splitlines() or ["no output"]
        print(f"{case}:", *lines, sep="\n", flush=True)
    last = next((line for line in lines if line.startswith("error: ")), lines[-1].strip("= "))
    failures = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]  # of pytest
    failed = {"failed": "; ".join([*failures, last])} if any(codes) else {}
    return {"case": case, "value": f"{time.monotonic() - began:.0f} s", "beside": last, **failed}


def train(
    name: str, device: str, *words: str, size: int = 1, killed: slice = slice(0), when: Callable[[], object] = bool
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run `tost train` on ranks that share the device, as a launcher starts them; the cell and the rows of the log.
    The ranks of `killed` are killed once `when()` is true."""
    for made in ("tokenizer", "shards"):  # once; from then on a check
        if "failed" in (cell := run(f"tost prepare {made} embedded", [*TOST, "prepare", made, "embedded"])):
            return cell, []
    with socket.create_server(("127.0.0.1", 0)) as free:
        here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1], "LOCAL_RANK": 0}
    here |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    # NCCL refuses two ranks of one host on a GPU. As if of two hosts, each uses the first GPU.
    ranks = [{**here, "RANK": rank, "NCCL_HOSTID": rank} for rank in range(size)]

    def kill(processes: list[subprocess.Popen[bytes]]) -> None:
        while processes[killed] and not when() and all(process.poll() is None for process in processes):
            time.sleep(0.1)
        for process in processes[killed]:
            process.kill()
            process.wait()  # a rank that is not waited for is not gone

    words += ("data.folder=data/embedded/shards", f"run.name={as_name(name)}", f"run.device={device}")
    words += ("run.log_interval=1", "run.loggers=[]")
    cell = run(name, [*TOST, "train", *words], ranks=ranks, during=kill)
    return cell, rows_of(name)


def step(case: str, device: str, *words: str) -> dict[str, Any]:
    """A cell of steps of `tost train`: rates, memory, losses, and the kernels of one."""
    if device == "cpu":
        words += (*SMALL, *(f"model.{name}={value}" for name, value in SMALL_SHAPE.items()))
    trace = WORK / f"runs/{as_name(case)}/profile/rank_00000_steps_{TRACED}-{TRACED}.json.gz"
    words += (f"run.profile_steps=[{TRACED}, {TRACED}]", f"run.stop_at_step={TRACED + 2}")  # a checkpoint needs disk
    cell, rows = train(case, device, *words, killed=slice(1), when=trace.is_file)  # before it writes a checkpoint
    if not trace.is_file():
        return cell
    rate, mfu = (median(row[key] or 0 for row in rows[STEPS : TRACED - 1]) for key in ("tokens_per_second", "mfu"))
    classes, kernels = kernels_in(trace, device)
    busy, calls = (sum(kernel[i] for kernel in kernels) for i in (1, 2))
    copies = sum(calls for name, _, calls in kernels if name.startswith("Mem"))
    seconds, peak = rows[0]["tokens"] / rate, rows[TRACED - 2]["memory_peak_bytes"]
    return {
        "case": case, "value": f"{_ms(seconds)}, {rate:,.0f} tokens/s",
        "beside": f"{f'MFU {mfu:.1%}; ' if mfu else ''}kernels {_ms(busy)} in {calls - copies:,} launches and "
        f"{copies:,} copies; {measure.in_units(peak)} of memory",
        "seconds": seconds, "tokens": rows[0]["tokens"], "peak_bytes": peak, "mfu": mfu, "kernel_seconds": busy,
        "launches": calls - copies, "copies": copies, "classes": classes, "kernels": kernels,
        "losses": [row["loss"] for row in rows[:STEPS]],
    }  # fmt: skip


def kernels_in(trace: Path, device: str) -> tuple[dict[str, list[Any]], list[list[Any]]]:
    """Seconds and calls of each class; name, seconds and calls of each kernel, the longest first. On a CPU, torch's
    operations, each with those that it calls."""
    events = [event for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"] if "dur" in event]
    of_kind = lambda *kinds: [event for event in events if event.get("cat") in kinds]
    passes_end = max(event["ts"] for event in events if event["name"].startswith("autograd::engine::"))
    calls = of_kind("cuda_runtime", "cuda_driver")
    launched = {event.get("args", {}).get("correlation"): event["ts"] for event in calls}
    classes, kernels = (defaultdict[str, list[Any]](lambda: [0.0, 0]) for _ in range(2))
    for event in of_kind(*(("kernel", "gpu_memcpy", "gpu_memset") if device == "cuda" else ("cpu_op",))):
        name, since = event["name"], launched.get(event.get("args", {}).get("correlation"), event["ts"])
        of_passes = next(kind for kind, words in CLASSES.items() if re.search(words, name))
        for found in (classes[of_passes if since <= passes_end else "optimizer"], kernels[name]):
            found[:] = found[0] + event["dur"] / 1e6, found[1] + 1
    return dict(classes), sorted(([name, *found] for name, found in kernels.items()), key=lambda one: -one[1])


def demo(device: str) -> Cells:
    """The first commands of `make demo`, as a reader types them: shards, training, resume, evaluation, a text."""
    commands = re.findall(r"^\t\$\(BIN\)/tost (.+)$", (CHECKOUT / "Makefile").read_text(), re.MULTILINE)
    for words in takewhile(lambda words: words[0] != "report", map(shlex.split, commands)):
        more = ["run.device=cpu", "train.steps=2"] if device == "cpu" and words[0] == "train" else []
        more += [] if words[0] != "train" or find_spec("wandb") else ["run.loggers=[]"]
        cell = run(shlex.join(["tost", *words]), [*TOST, *words, *more])
        yield cell
        if "failed" in cell:
            return


def device_rates(device: str) -> Cells:
    """Versions, and rates of launches, copies and matrix products."""
    from benchmarks.operator import copy_bandwidth

    installed = [x for x in ("torch", "triton", "fla-core", "deepspeed", "megatron-core") if find_spec(x.split("-")[0])]
    found = {"Python": sys.version.split()[0], **{name: metadata.version(name) for name in installed}}
    if device == "cuda":
        found |= {"CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, nccl.version()))}
    yield {"case": "versions", "value": ", ".join(map(" ".join, found.items()))}
    x = torch.zeros(1, device=device)
    seconds = median_seconds(lambda: [x.add_(1) for _ in range(LAUNCHES)], device) / LAUNCHES
    yield {"case": "launch of an operation", "value": f"{1e6 * seconds:.2f} µs", "seconds": seconds}
    copied = copy_bandwidth(device)
    yield {"case": "copy", "value": f"{copied['bytes_per_second'] / 1e9:,.0f} GB/s, read and written", **copied}
    # Those of a layer of tost-base at the recipe's size: forward, and the gradients of both factors.
    M, C, products = (60 * 1024, 768, []) if device == "cuda" else (256, 64, [])
    make = partial(torch.randn, device=device, dtype=torch.bfloat16)
    for read, written in ((C, C), (C, C), (C, 4 * C), (4 * C, C)):
        x, y, weight = make(M, read), make(M, written), make(written, read)
        products += [(x, weight.T), (y, weight), (y.T, x)]
    yield product_rate("matrix products of a layer, queued", products, device)
    if device == "cuda":
        yield product_rate("square matrix products, queued", [tuple(make(2, 8192, 8192))], device)


def product_rate(case: str, factors: list[Any], device: str) -> dict[str, Any]:
    """All are enqueued before one wait: a single product between two events takes longer, since it starts late."""

    def queue() -> None:
        for a, b in PRODUCTS_QUEUED * factors:
            torch.mm(a, b)

    flops = PRODUCTS_QUEUED * sum(2 * a.shape[0] * a.shape[1] * b.shape[1] for a, b in factors)
    rate = flops / median_seconds(queue, device)
    peak = peak_flops(torch.cuda.get_device_name(), "bfloat16") if device == "cuda" else None
    beside = f"{rate / peak:.0%} of the published peak" if peak else "peak unknown"
    return {"case": case, "value": f"{rate / 1e12:.4g} TFLOP/s", "beside": beside, "flops_per_second": rate}


def training_step(device: str) -> Cells:
    """Steps of tost-base, compiled, with DeepSpeed, and eager: rates, kernels by class, losses against float32."""
    eager, losses = "train.compile=false", dict[str, torch.Tensor]()
    ways = {"compiled": (), "compiled, DeepSpeed": ("parallel.engine=deepspeed",)} if find_spec("deepspeed") else {}
    ways |= {"compiled": (), "eager": (eager,), "float32": (eager, "train.dtype=float32")}
    for how, words in ways.items():
        cell = step(f"tost-base, {how}", device, *MODELS["tost-base"], *words)
        yield cell
        if "failed" in cell:
            return
        losses[how] = torch.tensor(cell["losses"])
    error, of_eager = (float((losses[how] / losses["float32"] - 1).norm()) for how in ("compiled", "eager"))
    cell = {"case": f"losses of {STEPS} compiled steps", "value": f"error {error:.2e}"}
    cell["beside"] = f"{of_eager:.2e} eager, both against float32"
    try:
        assert_as_accurate(losses["compiled"], losses["eager"], losses["float32"], "losses")
    except AssertionError as error:
        cell["failed"] = str(error)
    yield cell


def delta_step(device: str) -> Cells:
    """Compiled steps of delta-350m and of delta-1b at 8,192 tokens, with the kernels of fla-core."""
    for preset in ("delta-350m", "delta-1b"):
        if not compile_delta(device, preset):
            yield {"case": preset, "failed": NO_FLA}
            return
        yield step(preset, device, *MODELS[preset])


def tile_by_tile(device: str) -> Cells:
    """Steps of delta-350m on 131,072 tokens in tiles, with both kernels of attention."""
    if not compile_delta(device, "delta-350m"):
        yield {"case": "tiles", "failed": NO_FLA}
        return
    words = ("delta_350m", "train.seq_len=131072", "train.global_batch_size=1", "train.micro_batch_size=1")
    words += (f"memory.tile_tokens={8192 if device == 'cuda' else 32}",)
    yield step("delta-350m, 131,072 tokens in tiles", device, *words)
    case = "the same with Flash Attention 3"
    if device == "cuda" and not find_spec("flash_attn_interface"):
        yield {"case": case, "failed": "not tried: flash-attn-3 is not installed"}
    elif device == "cuda":
        yield step(case, device, *words, "train.attention=fa3")


def compile_delta(device: str, preset: str) -> bool:
    """Compile the kernels of D layers on all cores. False: fla-core is not installed."""
    if device == "cuda" and find_spec("fla"):
        code = "import sys; from benchmarks import tuning; tuning.compile_share(*sys.argv[1:])"
        shares = ([sys.executable, "-c", code, preset, str(i), str(COMPILERS)] for i in range(COMPILERS))
        for process in list(map(subprocess.Popen, shares)):
            process.wait()
    return device == "cpu" or find_spec("fla") is not None


def plain_loops(device: str) -> Cells:
    """The time of a step of softmax attention, and of delta-350m, beside that of a plain PyTorch loop."""
    heads, *sizes = (6, 15, 1024) if device == "cuda" else (1, 1, 64)  # the plain loop keeps all logits
    yield beside_plain_loop(device, model_of(device, "gpt2-base", heads=heads), *sizes)
    if find_spec("fla"):
        yield beside_plain_loop(device, model_of(device, "delta-350m"), *((8, 4096) if device == "cuda" else (2, 128)))


def two_ranks(device: str) -> Cells:
    """Two ranks on the device in each parallel layout, with the losses of one rank; a lost rank."""
    if not find_spec("megatron"):
        yield {"case": "two ranks", "failed": "not tried: megatron-core is not installed"}
        return
    words = ("demo", "model.pattern=TDDA", "train.steps=100000", "train.seq_len=128", *SMALL[1:])
    one_rank: list[float] = []
    for name, layout in LAYOUTS.items():
        cell, rows = train(name, device, *words, layout, f"run.stop_at_step={STEPS}", size=1 + (name != "one rank"))
        losses = [row["loss"] for row in rows]
        one_rank = one_rank or losses
        if "failed" in cell:
            yield cell
        elif losses is not one_rank:
            yield {"case": name, "losses": losses, "one_rank": one_rank, **compared(losses, one_rank)}
    words, name = (*words, LAYOUTS["ZeRO 1"]), "rank 1 killed"
    cell, _ = train(name, device, *words, size=2, killed=slice(1, 2), when=lambda: rows_of(name))
    lost = re.match(r"error: rank 1 \(.+\) was lost: its process is gone", cell["beside"])
    yield {"case": name, "value": cell["beside"]} if lost else cell


def compared(losses: list[float], one_rank: list[float]) -> dict[str, Any]:
    """Texts of a cell, or its failure."""
    differences = [abs(ours / theirs - 1) for ours, theirs in zip(losses, one_rank, strict=True)]
    text = {"value": f"losses differ by {max(differences):.1e}", "beside": f"from one rank's {one_rank[-1]:.4f}"}
    return text | ({} if all(x <= 1e-3 for x in differences) else {"failed": text["value"]})  # or are NaN


def decoding(device: str) -> Cells:
    """The time of a decoded token, eager and as a graph."""
    prompt, count = (1023, 64) if device == "cuda" else (63, 2)
    model = TostLM(model_of(device, "tost-base", max_positions=16_384)).to(device, torch.bfloat16).eval()
    state = prefill(model, [torch.randint(model.config.vocab_size, (1, prompt), device=device)]).state
    assert state is not None
    in_place, token_1 = decoder(model, state), torch.zeros(1, dtype=torch.int64, device=device)
    eager = torch.inference_mode()(lambda: model(token_1[:, None], state=state).logits)
    ways = {"eager": eager, "as a graph" if device == "cuda" else "in place": lambda: in_place(token_1)}
    for name, call in ways.items():
        seconds = median_seconds(lambda call=call: [call() for _ in range(count)], device) / count
        yield {"case": f"tost-base, a token after {prompt:,}, {name}", "value": _ms(seconds), "seconds": seconds}


def gpu_tests(device: str) -> Cells:
    """The tests that need a GPU: a compiled run that is killed and resumes; waits; kernels of all operators."""
    soon, others = ["-o", "timeout=60"], ["tests/gpu"]  # a test that hangs ends with its traceback
    first = [["tests/gpu/test_resumed_gpu.py"], ["tests/gpu/test_waits_gpu.py", *soon]]
    if device == "cuda":
        others += ["tests/unit/ops/test_cross_entropy_triton.py", *(["-n", "8"] if find_spec("xdist") else [])]
    for words in (*first, [*others, *soon, *(f"--ignore={words[0]}" for words in first)]):
        yield run(" ".join(words), [sys.executable, "-m", "pytest", "-vv", "--tb=short", *words], CHECKOUT)


def model_of(device: str, preset: str, **others: Any) -> ModelConfig:
    small = {} if device == "cuda" else SMALL_SHAPE
    return validate(ModelConfig, {"preset": preset, **small, **others}, "benchmarks.gpu")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3g} ms"


PARTS: dict[str, tuple[float, Callable[[str], Cells]]] = {
    "training step": (150, training_step),
    "delta step": (300, delta_step),
    "tile by tile": (120, tile_by_tile),
    "plain loop": (90, plain_loops),
    "device": (30, device_rates),
    "two ranks": (180, two_ranks),
    "decoding": (45, decoding),
    "tests": (300, gpu_tests),
    "demo": (120, demo),
}
"""The parts in the order in which they run, each with its time limit on a GPU in seconds, its start included, and its
cells on a device: `case`, `value` and `beside` or `failed`, and what was measured."""


class GpuSection(Section):
    """Device and time."""

    budget_minutes: float = Field(default=9.5, gt=0)
    """All parts end within this time [minutes]."""
    device: Literal["cuda", "cpu"] = "cuda"
    """cpu runs everything with small sizes on the processor, to try the program."""
    parts: list[Literal[tuple(PARTS)]] = Field(default=list(PARTS), min_length=1)  # pyright: ignore[reportInvalidTypeForm]
    """Parts to measure; earlier results of the others are kept."""


class GpuBenchmarkConfig(Section):
    """Settings of `benchmarks.gpu`."""

    gpu: GpuSection = GpuSection()


def main(_: None, config: GpuBenchmarkConfig) -> None:
    if config.gpu.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("gpu.device = cuda: torch finds no CUDA device; set gpu.device=cpu to try the program")
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    (WORK / "configs").symlink_to(CHECKOUT / "configs")
    deadline, machine = time.monotonic() + 60 * config.gpu.budget_minutes, measure.machine(config.gpu.device)
    path = results_file("gpu", machine["device"])
    stored = json.loads(path.read_text())["cells"] if path.is_file() else []
    earlier = [cell for cell in stored if cell["part"] not in config.gpu.parts]
    measured: list[dict[str, Any]] = []
    for part in (part for part in PARTS if part in config.gpu.parts):
        limit_s = deadline - time.monotonic() - GRACE_S
        if config.gpu.device == "cuda":  # a CPU may be slow
            limit_s = min(limit_s, PARTS[part][0])
        print(f"{part}, for at most {max(limit_s, 0):.0f} s", flush=True)
        cells = [{"failed": "not begun: gpu.budget_minutes is over", "time": measure.now()}]
        if limit_s > 0:
            cells = run_part(part, config.gpu.device, limit_s)
        measured += [{"part": part, **cell} for cell in cells]
        print(table(measured[-len(cells) :]), flush=True)
        path = measure.store("gpu", machine, config, [*measured, *earlier], table([*measured, *earlier]))
    print(f"\nwrote {path}")


def run_part(part: str, device: str, limit_s: float) -> list[dict[str, Any]]:
    """Run a part in a process of its own, which writes its cells; the last one is how that process ends if not well."""
    cells_file(part).unlink(missing_ok=True)
    code = "import sys; from benchmarks import gpu; gpu.measure_part(*sys.argv[1:])"
    # Processes of the part find the package where it is not installed.
    paths = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
    with cells_file(part).with_suffix(".txt").open("w") as file:
        start = partial(subprocess.Popen, env=environment, stdout=file, stderr=file, start_new_session=True)
        process, how = start([sys.executable, "-c", code, part, device]), ""
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        how = f"over {limit_s:.0f} s"
    finally:
        end(process)
    cells = measure.read_cells(cells_file(part))
    if process.returncode:
        if process.returncode < 0 and not how:
            how = f"ended by {signal.Signals(-process.returncode).name}"
        text = cells_file(part).with_suffix(".txt").read_text(errors="replace").strip().replace(f"{CHECKOUT}/", "")
        last = (text.splitlines() or ["no output"])[-1]
        cells.append({"failed": how or last, "traceback": text[-8000:], "time": measure.now()})
    return cells


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process with all that it has started: by SIGINT, so that tracebacks are printed, then by SIGKILL."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def measure_part(part: str, device: str) -> None:
    """In a process of its own: append the cells of a part to its file, one by one."""
    measure.print_tracebacks()
    for cell in PARTS[part][1](device):
        measure.append_cell(str(cells_file(part)), {"value": "", "beside": "", **cell, "time": measure.now()})


def cells_file(part: str) -> Path:
    return OUTPUTS / f"{as_name(part)}.jsonl"


def rows_of(run_name: str) -> list[dict[str, Any]]:
    return read_rows(WORK / f"runs/{as_name(run_name)}/metrics.jsonl")


def as_name(text: str) -> str:
    """Of a file or a run."""
    return re.sub("[^a-zA-Z0-9]+", "_", text)


def table(cells: Sequence[Mapping[str, Any]]) -> str:
    """A line for each cell, and one for each class of kernels."""
    rows = []
    for cell in cells:
        case, value = cell.get("case", ""), cell.get("failed") or cell.get("value", "")
        rows.append({"part": cell["part"], "case": case, "value": value, "beside it": cell.get("beside", "")})
        for name, (seconds, calls) in cell.get("classes", {}).items():
            rows.append({**rows[-1], "case": f"{case}: {name}", "value": _ms(seconds), "beside it": f"{calls:,} calls"})
    return measure.markdown_table(rows)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the part that runs ends, too
    run_program(main, name="benchmarks.gpu", doc=__doc__ or "", positional="[CONFIG]", config=GpuBenchmarkConfig)
