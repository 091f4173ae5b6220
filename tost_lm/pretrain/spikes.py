"""Which steps are skipped: those that are not finite, and spikes."""

import math
from statistics import fmean, pstdev

from tost_lm.checkpointing.format import Progress
from tost_lm.errors import TrainingError

WINDOW = 128
"""Applied steps that a step is compared with; half of them must exist before spikes are detected."""


class SpikeGuard:
    """Decides by loss and gradient norm, which are equal on all ranks, so all ranks decide alike."""

    def __init__(self, sigmas: float | None, abort_after: int, progress: Progress) -> None:
        """Args:
        sigmas: a value this many standard deviations above the mean of the recent steps is a spike; None: none is.
        abort_after: this many skipped steps in a row end the run.
        progress: has the recent steps of an earlier launch.
        """
        self._sigmas, self._abort_after = sigmas, abort_after
        self.recent, self.in_a_row = progress.recent, progress.skipped_in_a_row

    def reason_to_skip(self, loss: float, grad_norm: float) -> str:
        """Why the step must not be applied, in a few words; empty: apply it."""
        names = ("loss", "gradient norm")
        for name, value in zip(names, (loss, grad_norm), strict=True):
            if not math.isfinite(value):
                return f"{name} is {value}"
        if self._sigmas is None or len(self.recent) < WINDOW // 2:
            return ""
        for name, value, before in zip(names, (loss, grad_norm), zip(*self.recent, strict=True), strict=True):
            mean, deviation = fmean(before), pstdev(before)
            if value > mean + self._sigmas * deviation:
                far = (value - mean) / deviation if deviation else math.inf
                return f"{name} {value:.4g} is {far:.1f} standard deviations above {mean:.4g}"
        return ""

    def record(self, loss: float, grad_norm: float, reason_to_skip: str, step: int) -> None:
        """Record a step. Raises TrainingError when too many in a row were skipped."""
        if not reason_to_skip:
            self.in_a_row = 0
            if self._sigmas is not None:
                self.recent = (*self.recent, (loss, grad_norm))[-WINDOW:]
            return
        self.in_a_row += 1
        if self.in_a_row >= self._abort_after:
            raise TrainingError(
                f"step {step}: {reason_to_skip}; {self.in_a_row} steps in a row were skipped (run.abort_after_skips): "
                "lower optim.lr, or inspect the samples listed in events.jsonl"
            )
