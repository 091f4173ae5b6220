"""Traces of training steps, for chrome://tracing and Perfetto."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.profiler import profile


class Profiler:
    """Traces the steps from `steps[0]` to `steps[1]`, both included, on each rank; None: none.

    Steps are counted from 1, as in the log. A launch that covers only some of them traces these.
    """

    def __init__(self, steps: tuple[int, int] | None, folder: Path, rank: int, device: torch.device) -> None:
        self._steps, self._folder, self._rank, self._device = steps, folder, rank, device
        self._trace: profile | None = None
        self._first = self._last = 0

    def before_step(self, step: int) -> None:
        if self._steps and self._trace is None and self._steps[0] <= step <= self._steps[1]:
            from torch.profiler import ProfilerActivity, profile

            cuda = [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
            self._trace = profile(activities=[ProfilerActivity.CPU, *cuda])
            self._trace.start()
            self._first = step

    def after_step(self, step: int) -> None:
        self._last = step
        if self._steps and step == self._steps[1]:
            self.close()

    def close(self) -> None:
        """Write the trace, if there is one, atomically: rank_00000_steps_10-12.json.gz."""
        if self._trace is None:
            return
        trace, self._trace = self._trace, None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # include the last step's kernels
        trace.stop()
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"rank_{self._rank:05d}_steps_{self._first}-{self._last}.json.gz"
        temp_path = path.with_name(f".{path.name}")
        trace.export_chrome_trace(str(temp_path))
        temp_path.replace(path)
