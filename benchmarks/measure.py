"""Shared by all benchmarks: a new process for each cell, time, peak memory, and the table at the end.

A cell is a function `f(device=…, **arguments) -> dict` of plain values, named "package.module:function". Memory is
measured once, in its own process. Times are medians of rounds in which the rivals take turns.
"""

import faulthandler
import importlib
import json
import platform
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from math import comb
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Literal, TypeVar

from pydantic import Field, PositiveInt

from tost_lm.config import Section
from tost_lm.errors import ConfigError
from tost_lm.files import write_atomically
from tost_lm.version import VERSION, git_commit

CHECKOUT = Path(__file__).parents[1]
RESULTS = Path("results/benchmarks")
NOT_TRIED = {"failed": "–"}
CPU_MEMORY_LIMIT = 0.8  # fraction of the free memory; a cell that needs more fails before the machine swaps
EXPECTED_FAILURES = {
    "out of memory|can't allocate memory|bad_alloc|MemoryError": "out of memory",
    "No available kernel": "no such kernel",
    "cannot import name .* from 'torch": "not in this torch",
}


def results_file(benchmark: str, device: str) -> Path:
    """Where a benchmark stores what it measured on this device; in the working folder, as runs/."""
    return RESULTS / f"{benchmark}_{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def run_cell(function: str, *, device: str, limit_s: float, **arguments: Any) -> dict[str, Any]:
    """Call "package.module:function" in a new process; returns its dict, or {"failed": why} (out of memory or time).

    Args:
        function: a cell.
        device: passed to the cell. On a CPU its memory is limited too.
        limit_s: seconds after which the process is killed, its start included.
        arguments: passed to the cell as JSON.

    Raises:
        RuntimeError: the cell failed for another reason; the message is its stderr.
    """
    RESULTS.mkdir(parents=True, exist_ok=True)  # a folder that is not writable is found before the work
    command = [sys.executable, "-m", "benchmarks.measure", function, json.dumps({"device": device, **arguments})]
    try:
        done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"failed": f"over {limit_s:g} s"}
    if done.returncode:
        for pattern, words in EXPECTED_FAILURES.items():
            if re.search(pattern, done.stderr):
                return {"failed": words}
        if done.returncode == -signal.SIGKILL:
            return {"failed": "out of memory"}  # killed by the kernel
        raise RuntimeError(f"{function} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


class HeadShape(Section):
    """Shape of the head; the defaults are those of tost-base."""

    width: int = Field(default=768, gt=0)
    """Channels."""
    vocab_size: int = Field(default=50304, gt=0)
    """Rows of the embedding."""


class ModelShape(HeadShape):
    """Shape of the measured model; the defaults are those of tost-base."""

    layers: int = Field(default=12, gt=0)
    """Blocks."""
    heads: int = Field(default=12, gt=0)
    """Heads of the mixers."""


class DeviceConfig(Section):
    """Where a benchmark runs, and for how long."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device; `auto` is cuda if it is available, else cpu. A benchmark without bench.dtype uses bfloat16 on cuda."""
    cell_seconds: float = Field(default=3600.0, gt=0)
    """Time limit of each process [s]."""

    def resolved_device(self) -> str:
        """cuda or cpu. Raises ConfigError when there is no CUDA device."""
        from tost_lm.inference.evaluated import pick_device

        if self.device == "cuda" and pick_device() != "cuda":
            raise ConfigError("bench.device = cuda: no CUDA device is available; set auto or cpu")
        return pick_device() if self.device == "auto" else self.device


class BenchConfig(DeviceConfig):
    """Lengths, data type, device and time limit."""

    lengths: list[PositiveInt] = Field(default=[1024, 4096, 16384, 131072, 1048576], min_length=1)
    """Tokens of the sequence, or of the context before the decoded token."""
    cell_seconds: float = Field(default=60.0, gt=0)
    """Time limit of each process [s]; a rival that exceeds it at one length is not tried at a longer one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type; `auto` is bfloat16 on cuda (flash attention needs it), else float32."""

    def resolved_dtype(self) -> str:
        by_device = "bfloat16" if self.resolved_device() == "cuda" else "float32"
        return by_device if self.dtype == "auto" else self.dtype


AnyConfig = TypeVar("AnyConfig", bound=Section)


def benchmark(
    name: str, run: Callable[[AnyConfig, str], tuple[Sequence[Mapping[str, Any]], str]]
) -> Callable[[Path | None, AnyConfig], None]:
    """The main function of a benchmark program: it prints the text of `run(config, device)`, and stores its cells."""

    def main(path: Path | None, config: AnyConfig) -> None:
        bench = getattr(config, "bench", None)
        device = bench.resolved_device() if bench else "cpu"
        cells, text = run(config, device)
        print(f"\n{text}\n\nwrote {store(name, machine(device), config, cells, text)}")

    return main


def measure_table(
    module: str,
    bench: BenchConfig,
    works: Sequence[str],
    rivals: Mapping[str, Any],
    described: Callable[[Mapping[str, Any]], str],
    **call: Any,
) -> list[dict[str, Any]]:
    """A cell for each work, length and rival: work, tokens, rival, and the measured values or `failed`.

    `module:one_call(device=…, work=…, tokens=…, dtype=…, rival=…, **call)` returns a dict with `seconds` of a single
    call, in its own process to measure memory. Rivals that are fast enough then take turns in
    `module:time_in_turns(rivals=…, budget_s=…, …)`, which returns the seconds of each by name. A rival that fails at
    one length is not tried at a longer one.
    """
    device, dtype = bench.resolved_device(), bench.resolved_dtype()
    cells: list[dict[str, Any]] = []
    for work in works:
        given_up: set[str] = set()
        for tokens in sorted(set(bench.lengths)):
            row = _measure_row(
                module, bench.cell_seconds, {name: x for name, x in rivals.items() if name not in given_up},
                device=device, dtype=dtype, work=work, tokens=tokens, **call,
            )  # fmt: skip
            row = [{"work": work, "tokens": tokens, "rival": name, **row.get(name, NOT_TRIED)} for name in rivals]
            given_up |= {cell["rival"] for cell in row if "failed" in cell}
            print(f"{work}, {tokens:,} tokens: " + "; ".join(f"{c['rival']} {described(c)}" for c in row), flush=True)
            cells += row
    return cells


def _measure_row(
    module: str, limit_s: float, rivals: Mapping[str, Any], *, device: str, **call: Any
) -> dict[str, dict[str, Any]]:
    cells = {
        name: run_cell(f"{module}:one_call", device=device, limit_s=limit_s, rival=rival, **call)
        for name, rival in rivals.items()
    }
    # Fast enough that warm-up and two rounds end in time.
    quick = {name: rivals[name] for name, cell in cells.items() if cell.get("seconds", [limit_s])[0] < limit_s / 16}
    if quick:
        raced = run_cell(
            f"{module}:time_in_turns", device=device, limit_s=limit_s, rivals=quick, budget_s=limit_s / 6, **call
        )
        for name in quick.keys() & raced.keys():
            cells[name]["seconds"] = raced[name]
    return cells


def interleaved_seconds(
    functions: Mapping[str, Callable[[], object]], device: str, *, budget_s: float, repeats: int = 7
) -> dict[str, list[float]]:
    """Seconds of each call, by name. After one warm-up call of each, the rivals take turns, so other load on the
    machine affects all of them. The order changes from round to round, because a call is slower after one that leaves
    the memory in another state. `repeats` rounds, or fewer (at least one) when they exceed `budget_s`."""
    for function in functions.values():
        function()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    began = time.perf_counter()
    for done in range(repeats):
        if done and time.perf_counter() - began > budget_s:
            break
        for name in Random(done).sample(list(functions), len(functions)):
            seconds[name].append(call_seconds(functions[name], device))
    return seconds


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Interval that covers the median of the values' distribution, whatever its form, with a probability of at least
    95 % (sign test); from the least to the greatest when they are fewer than six, which covers it less often."""
    ordered, outside, probability = sorted(values), 0, 2 * 0.5 ** len(values)
    while probability <= 0.05:
        outside += 1
        probability += 2 * comb(len(ordered), outside) * 0.5 ** len(ordered)
    return ordered[max(outside - 1, 0)], ordered[-max(outside, 1)]


def call_seconds(function: Callable[[], object], device: str) -> float:
    """Seconds of one call, until the device has finished."""
    _synchronize(device)
    start = time.perf_counter()
    function()
    _synchronize(device)
    return time.perf_counter() - start


def median_seconds(
    function: Callable[[], object],
    device: str,
    *,
    repeats: int = 20,
    budget_s: float = 2.0,
    warm_up: bool = True,
) -> float:
    """The median of up to `repeats` calls in about `budget_s` seconds, at least one; on a GPU between CUDA events."""
    if warm_up:
        function()
    seconds, began = [_event_seconds(function, device)], time.perf_counter()
    while len(seconds) < repeats and time.perf_counter() - began + seconds[-1] < budget_s:
        seconds.append(_event_seconds(function, device))
    return median(seconds)


def _event_seconds(function: Callable[[], object], device: str) -> float:
    if device != "cuda":
        return call_seconds(function, device)
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def peak_extra_bytes(function: Callable[[], object], device: str) -> int:
    """Peak memory of one call beyond the memory held before it.

    On a CPU it is resident memory (Linux): call the function on a small input first, so that libraries are loaded.
    """
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM := VmRSS
    before = _resident_bytes("VmRSS")
    function()
    return _resident_bytes("VmHWM") - before


def peak_bytes(device: str) -> int:
    """Peak memory of this process: on a CPU resident memory (Linux), libraries included."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    return _resident_bytes("VmHWM")


def held_bytes(device: str) -> int:
    """Memory that this process holds now: on a CPU resident memory (Linux), libraries included."""
    if device == "cuda":
        import torch

        return torch.cuda.memory_allocated()
    return _resident_bytes("VmRSS")


def markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows with the same columns as a Markdown table, padded to read well as plain text."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def in_units(size: float) -> str:
    """Bytes with three digits and a unit."""
    power = max(p for p in range(4) if size >= 1000**p or p == 0)
    return f"{size / 1000**power:.3g} {('B', 'kB', 'MB', 'GB')[power]}"


def store(
    name: str, machine: Mapping[str, Any], settings: Section, cells: Sequence[Mapping[str, Any]], text: str
) -> Path:
    """Write results/benchmarks/NAME_DEVICE.json (settings, machine and every cell) and .md (`text`); returns the path
    of the latter. Earlier results of the same machine are replaced."""
    path = results_file(name, machine["device"]).with_suffix(".md")
    record = {"benchmark": name, "machine": machine, "settings": settings.model_dump(mode="json"), "cells": list(cells)}
    write_atomically(path.with_suffix(".json"), json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    about = "; ".join(f"{key} {value}" for key, value in machine.items())
    write_atomically(path, f"# {name}\n\n{about}\n\n{text.strip()}\n")
    return path


def print_tracebacks() -> None:
    """From now on this process prints the tracebacks of its threads where a signal such as SIGSEGV ends it, and at
    SIGINT, even while Python waits for a device."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
    faulthandler.register(signal.SIGINT, chain=True)


def append_cell(path: str, cell: Mapping[str, Any]) -> None:
    """Add a line of JSON to a file at once, so that it stays if this process is killed."""
    with open(path, "a") as file:
        file.write(json.dumps(cell) + "\n")


def read_cells(path: Path) -> list[dict[str, Any]]:
    """The complete lines that `append_cell` has written so far; none without the file."""
    text = path.read_text() if path.is_file() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def machine(device: str) -> dict[str, Any]:
    """The device, versions, and the time, of `store`."""
    import torch

    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    cpu_name = cpu[1] if cpu else platform.machine()
    return {
        "device": torch.cuda.get_device_name()
        if device == "cuda"
        else f"{cpu_name}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "tost_lm": VERSION,
        "commit": git_commit(),
        "time": now(),
    }


def now() -> str:
    """ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _synchronize(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def _resident_bytes(key: str) -> int:
    found = re.search(rf"{key}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found, key
    return 1024 * int(found[1])


def _limit_memory() -> None:
    free = re.search(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text())
    assert free
    limit = int(CPU_MEMORY_LIMIT * 1024 * int(free[1]))
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _main(function: str, arguments: str) -> None:
    module, name = function.split(":")
    keywords = json.loads(arguments)
    if keywords["device"] == "cpu":
        _limit_memory()
    print(json.dumps(getattr(importlib.import_module(module), name)(**keywords)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
