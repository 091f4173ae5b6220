"""All GPU measurements in one command, most valuable first, each part in a process of its own.

    python -m benchmarks.gpu
    python -m benchmarks.gpu 'gpu.parts=["decoding"]'
    python -m benchmarks.gpu gpu.device=cpu

Parts: the first commands of `make demo`; rates of the device; a compiled step of tost-base at the size of its recipe,
with its losses, MFU and kernels; two ranks on the GPU in each parallel layout, of which one is killed; the same layers
in a plain PyTorch loop; decoding; the tests that need a GPU; compiled steps of delta_350m and delta_1b. At its time
limit a part gets SIGINT, ten seconds later SIGKILL. Whatever ends it, its results so far and the end of its output are
stored, and the next part runs. It runs from a checkout with torch, triton, numpy, pytest, safetensors, xxhash and
pydantic; DeepSpeed, megatron-core and fla-core are used where they can be imported. Output: a table and all values in
results/benchmarks/, and the output of each part in results/benchmarks/gpu/.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NEEDED = ("torch", "triton", "numpy", "pytest", "safetensors", "xxhash", "pydantic")
NEEDED += ("pydantic_core", "annotated_types", "typing_inspection")  # of pydantic
TRACEBACK_CHARACTERS = 8000
GRACE_S = 10.0
"""For a part to print its traceback after SIGINT, before SIGKILL."""


def exit_if_packages_are_missing() -> None:
    """Before anything else is imported: name what is missing, and how to bring it to a machine without an index."""
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        names, version = " ".join(missing), f"{sys.version_info.major}.{sys.version_info.minor}"
        print(
            f"error: packages are missing: {', '.join(missing)}; where there is an index, run pip download -d wheels "
            f"--only-binary=:all: --python-version {version} {names}, bring the folder here, and run pip install "
            f"--no-index --find-links wheels {names}",
            file=sys.stderr,
        )
        sys.exit(2)


if __name__ == "__main__":
    exit_if_packages_are_missing()

from benchmarks import measure  # noqa: E402
from benchmarks.gpu_settings import PARTS, GpuBenchmarkConfig  # noqa: E402
from benchmarks.measure import RESULTS, results_file  # noqa: E402
from tost_lm.command_line import run_program  # noqa: E402
from tost_lm.errors import TostError  # noqa: E402

OUTPUTS = RESULTS / "gpu"


def main(path: None, config: GpuBenchmarkConfig) -> None:
    OUTPUTS.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * config.gpu.budget_minutes
    machine: Mapping[str, Any] = {}
    measured: list[dict[str, Any]] = []
    for part in (part for part in PARTS if part in config.gpu.parts):
        limit_s = deadline - time.monotonic() - GRACE_S
        if config.gpu.device == "cuda":  # a CPU may be slow
            limit_s = min(limit_s, PARTS[part].limit_s)
        print(f"{part}, for at most {max(limit_s, 0):.0f} s", flush=True)
        first, *cells = [{}, {"failed": "not begun: gpu.budget_minutes is over"}]
        if limit_s > 0:
            failure = run_part(part, config.gpu.device, limit_s)
            first, *cells = [*(measure.read_cells(cells_file(part)) or [{}]), *failure]
        cells = [{"part": part, **cell} for cell in cells]
        measured, machine = [*measured, *cells], machine or first
        print(table(cells), flush=True)
        if machine:
            everything = [*measured, *cells_of_other_parts(results_file("gpu", machine["device"]), config.gpu.parts)]
            measure.store_of_machine("gpu", machine, config, everything, table(everything))
        elif (problem := cells[-1]["failed"]).startswith("error: "):
            raise TostError(problem.removeprefix("error: "))
    print(
        f"\nwrote {results_file('gpu', machine['device']).with_suffix('.md')}" if machine else "\nnothing was measured"
    )


def run_part(part: str, device: str, limit_s: float) -> list[dict[str, Any]]:
    """Run a part in a process of its own, which writes its cells; a cell if that process does not end well."""
    cells_file(part).unlink(missing_ok=True)
    words = [sys.executable, "-m", "benchmarks.gpu_parts", part, str(cells_file(part).absolute()), device]
    # Processes of the part find the package where it is not installed.
    paths = os.pathsep.join(filter(None, [str(measure.CHECKOUT), os.environ.get("PYTHONPATH")]))
    with output_file(part).open("w") as file:
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(words, env=environment, stdout=file, stderr=file, start_new_session=True)
    how = ""
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        how = f"over {limit_s:.0f} s"
    finally:
        end(process)
    if process.returncode == 0:
        return []
    if process.returncode < 0 and not how:
        how = f"ended by {signal.Signals(-process.returncode).name}"
    output = output_file(part).read_text(errors="replace").strip().replace(f"{measure.CHECKOUT}/", "")
    last = (output.splitlines() or ["no output"])[-1]
    return [{"failed": how or last, "traceback": output[-TRACEBACK_CHARACTERS:], "time": measure.now()}]


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process with all that it has started: by SIGINT, so that tracebacks are printed, then by SIGKILL."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def cells_file(part: str) -> Path:
    return OUTPUTS / f"{part.replace(' ', '_')}.jsonl"


def output_file(part: str) -> Path:
    return OUTPUTS / f"{part.replace(' ', '_')}.txt"


def cells_of_other_parts(path: Path, parts: Sequence[str]) -> list[dict[str, Any]]:
    """Results of earlier runs on this device, of the parts that this run leaves out."""
    cells = json.loads(path.read_text())["cells"] if path.is_file() else []
    return [cell for cell in cells if cell["part"] not in parts]


def table(cells: Sequence[Mapping[str, Any]]) -> str:
    return measure.markdown_table([row for cell in cells for row in rows(cell)])


def rows(cell: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """The line of a cell, and one for each class of kernels."""
    case = cell.get("case", "")
    value, beside = cell.get("failed") or cell.get("value", ""), cell.get("beside", "")
    yield {"part": cell["part"], "case": case, "value": value, "beside it": beside}
    for name, (seconds, calls) in cell.get("classes", {}).items():
        texts = {"value": f"{1e3 * seconds:,.3g} ms", "beside it": f"{calls:,} calls"}
        yield {"part": cell["part"], "case": f"{case}: {name}", **texts}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the part that runs ends, too
    run_program(main, name="benchmarks.gpu", doc=__doc__ or "", positional="[CONFIG]", config=GpuBenchmarkConfig)
