"""A trace of some steps, for chrome://tracing and Perfetto."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.profiler import profile


class Profiler:
    """Traces the steps from the one to the other, both included, on each rank; without steps it does nothing.

    Steps are counted as in the log: the first is 1. A launch that begins or ends between the two traces its part.
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
        """Write what was traced, whole or not at all: rank_00000_steps_10-12.json.gz."""
        if self._trace is None:
            return
        trace, self._trace = self._trace, None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the kernels of the last step belong to it
        trace.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank_{self._rank:05d}_steps_{self._first}-{self._last}.json.gz"
        aside = path.with_name(f".{path.name}")
        trace.export_chrome_trace(str(aside))
        aside.replace(path)
