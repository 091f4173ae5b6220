"""The part of `benchmarks.gpu` that starts the ranks of `benchmarks.gpu_ranks` on one device, and compares them."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.measure import read_cells

Cells = Iterator[dict[str, Any]]
LARGEST_DIFFERENCE = 1e-3
CONNECT_S = {"cuda": 45.0, "cpu": 600.0}
"""For ranks to start and to connect. NCCL may refuse two ranks on a GPU, or wait."""
SHOW_S = 2.5
"""For a process to print its traceback after SIGINT."""


def two_ranks(device: str) -> Cells:
    """Two ranks on this device, over NCCL or else gloo, beside the steps of one rank; at the end rank 1 is killed."""
    if not find_spec("deepspeed"):
        yield {"case": "two ranks", "failed": "not tried: deepspeed is not installed"}
        return
    with tempfile.TemporaryDirectory(prefix="tost_lm_bench_") as folder, ExitStack() as at_end:

        def start(size: int, backend: str) -> Ranks:
            ranks = Ranks(size, backend, device, Path(folder, f"{size} {backend}"))
            at_end.callback(ranks.show_output)
            return ranks

        alone = start(1, "nccl" if device == "cuda" else "gloo")
        for backend in ("nccl", "gloo"):
            ranks = start(2, backend)
            if ranks.are_connected():
                break
            yield {"case": f"two ranks by {backend}", "failed": f"did not connect: {ranks.last_line()}"}
        else:
            return
        one_rank = next(alone.cells(), None) or {"case": "one rank", "failed": alone.last_line()}
        if "failed" in one_rank:
            yield one_rank
        for cell in ranks.cells():
            texts = compared(cell["losses"], one_rank["losses"]) if "losses" in cell and "losses" in one_rank else {}
            yield {**cell, "case": f"{cell['case']}, {backend}", **texts}
        yield {"case": f"rank 1 killed, {backend}", **ranks.survivor()}


def compared(losses: list[float], one_rank: list[float]) -> dict[str, Any]:
    """Texts of a cell, or its failure."""
    differences = [abs(ours / theirs - 1) for ours, theirs in zip(losses, one_rank, strict=True)]
    text = {"value": f"losses differ by {max(differences):.1e}", "beside": f"from one rank's {one_rank[-1]:.4f}"}
    fails = {} if all(x <= LARGEST_DIFFERENCE for x in differences) else {"failed": text["value"]}  # or are NaN
    return {**text, "one_rank": one_rank, **fails}


class Ranks:
    """Processes of `benchmarks.gpu_ranks`, which write cells to a file. They end with this process group."""

    def __init__(self, size: int, backend: str, device: str, folder: Path) -> None:
        folder.mkdir()
        self._folder, self._device, self._processes = folder, device, []
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        launcher = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        for rank in range(size):
            # NCCL refuses two ranks of one host on a GPU. As if of two hosts, each uses the first GPU.
            here = {**launcher, "RANK": rank, "LOCAL_RANK": 0, "NCCL_HOSTID": rank} if size > 1 else {}
            environment = {**os.environ, **{name: str(value) for name, value in here.items()}}
            words = [sys.executable, "-m", "benchmarks.gpu_ranks", str(folder / "cells"), backend, device]
            with (folder / f"rank_{rank}").open("w") as output:
                self._processes.append(subprocess.Popen(words, env=environment, stdout=output, stderr=output))

    def are_connected(self) -> bool:
        """Whether all ranks connect in time; otherwise they are killed."""
        deadline = time.monotonic() + CONNECT_S[self._device]
        while time.monotonic() < deadline and all(process.poll() is None for process in self._processes):
            if read_cells(self._folder / "cells"):
                return True
            time.sleep(0.1)
        for process in self._processes:
            process.kill()
            process.wait()
        return False

    def cells(self) -> Cells:
        """Those of the layouts, as they are written, until a rank ends."""
        found = 1  # the first cell says that the ranks are connected
        while True:
            is_over = any(process.poll() is not None for process in self._processes)
            cells = read_cells(self._folder / "cells")
            yield from cells[found:]
            found = max(found, len(cells))
            if is_over:
                return
            time.sleep(0.1)

    def survivor(self) -> dict[str, Any]:
        """How rank 0 ends after rank 1 was killed: texts of a cell, or its failure."""
        killed = self._processes[1].wait()
        since = time.monotonic()
        code = self._processes[0].wait()
        seconds, line = time.monotonic() - since, self.last_line()
        named = re.match(r"error: rank 1 \(.+\) was lost: its process is gone", line)
        ended = killed == -signal.SIGKILL and code == 2 and named
        return {"value": line, "beside": f"after {seconds:.1f} s"} | ({} if ended else {"failed": f"{code}: {line}"})

    def last_line(self) -> str:
        """The error of rank 0, or else what it has printed last."""
        lines = (self._folder / "rank_0").read_text(errors="replace").splitlines()
        return next((line for line in lines if line.startswith("error: ")), lines[-1] if lines else "no output")

    def show_output(self) -> None:
        """Print what the ranks have printed; at SIGINT, which they get too, with their tracebacks."""
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(SHOW_S)
        for path in sorted(self._folder.glob("rank_*")):
            print(f"{path.parent.name}, {path.name}:\n{path.read_text(errors='replace')}")
