"""All GPU measurements in one command, most valuable first, in one process.

    python -m benchmarks.gpu gpu.budget_minutes=8
    python -m benchmarks.gpu gpu.device=cpu shape.layers=1 shape.width=64 shape.heads=2 'lengths.operator=[1024]'

It runs from a checkout with torch, triton, numpy, pytest, safetensors, xxhash and pydantic. DeepSpeed and
flash-linear-attention are used where they can be imported. Results are written after each measurement, so a run that is
stopped keeps those it has; measurements for which no time is left are listed. Times are medians between CUDA events.
Output: one table, all values and what the operator's tests print in benchmarks/results/, from where `tost plan` takes
its constants for this GPU.
"""

import json
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

NEEDED = ("torch", "triton", "numpy", "pytest", "safetensors", "xxhash", "pydantic")
NEEDED += ("pydantic_core", "annotated_types", "typing_inspection")  # of pydantic
USED = {"deepspeed": "training in a plain loop", "fla": "no linear attention beside ours", "xdist": "tests one by one"}


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
from tost_lm.config import run_program  # noqa: E402
from tost_lm.errors import ConfigError, TostError  # noqa: E402


def main(path: Any, config: GpuBenchmarkConfig) -> None:
    import torch

    from benchmarks.gpu_parts import MEASUREMENTS, context_is_lost, free_memory

    device = config.gpu.device
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("gpu.device = cuda: torch finds no CUDA device; set gpu.device=cpu to try the program")
    for name, without in USED.items():
        if find_spec(name) is None:
            print(f"{name} is not installed: {without}")
    began, cells = time.monotonic(), cells_of_other_parts(config)
    deadline = began + 60 * config.gpu.budget_minutes
    parts = [part for part in PARTS if part in config.gpu.parts]
    for part in parts:
        begin, _ = MEASUREMENTS[part]
        for cell in _guarded(begin(config, device, deadline), deadline):
            seconds = time.monotonic() - began
            cells.append({"part": part, **cell, "at_s": round(seconds, 1)})
            print(f"{seconds:6.1f} s  " + "  ".join(row(cells[-1]).values()), flush=True)
            measure.store("gpu", device, config, cells, table(cells))
        if context_is_lost(device):
            rest = json.dumps(parts[parts.index(part) + 1 :])
            raise TostError(
                f"the error in {part!r} made the device unusable; measure the others with gpu.parts='{rest}'"
            )
        free_memory(device)
    print(f"\nwrote {measure.table_file('gpu', device)}")


def cells_of_other_parts(config: GpuBenchmarkConfig) -> list[dict[str, Any]]:
    """Results of earlier runs on this machine, of the parts that this run leaves out."""
    path = measure.table_file("gpu", config.gpu.device).with_suffix(".json")
    cells = json.loads(path.read_text())["cells"] if path.is_file() else []
    return [cell for cell in cells if cell["part"] not in config.gpu.parts]


def _guarded(cells: Iterator[Mapping[str, Any]], deadline: float) -> Iterator[Mapping[str, Any]]:
    """The cells of a part. It ends with a line of its own when time is up, or if a measurement fails."""
    try:
        while True:
            if time.monotonic() > deadline:
                yield {"failed": "not begun: gpu.budget_minutes is over"}
                return
            if (cell := next(cells, None)) is None:
                return
            yield cell
    except Exception as error:  # the measurements after it are still worth having
        first_line = (str(error).splitlines() or [""])[0]
        yield {"failed": f"{type(error).__name__}: {first_line}", "traceback": traceback.format_exc()[-8000:]}


def table(cells: Sequence[Mapping[str, Any]]) -> str:
    return measure.markdown_table([row(cell) for cell in cells])


def row(cell: Mapping[str, Any]) -> dict[str, str]:
    """A line of the table."""
    from benchmarks.gpu_parts import MEASUREMENTS

    value, beside = (cell["failed"], "") if "failed" in cell else MEASUREMENTS[cell["part"]][1](cell)
    return {"part": cell["part"], "case": cell.get("case", ""), "value": value, "beside it": beside}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that tests that run end, too
    run_program(main, name="benchmarks.gpu", doc=__doc__ or "", positional="[CONFIG]", config=GpuBenchmarkConfig)
