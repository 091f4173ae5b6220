"""Which steps are not applied: a loss or a gradient that is not finite, or a spike of them."""

import math
from statistics import fmean, pstdev

from tost_lm.errors import TrainingError
from tost_lm.training.progress import Progress

WINDOW = 128
"""Applied steps that the next is judged by; the first half of it is judged by nothing."""


class Guard:
    """Judges each step by its loss and gradient norm, which are the same on all ranks, so all decide alike."""

    def __init__(self, sigmas: float | None, abort_after: int, progress: Progress) -> None:
        """Args:
        sigmas: how many standard deviations above the mean of the steps before is too much; None: any finite will do.
        abort_after: as many skipped steps in a row end the run.
        progress: holds what an earlier guard of the run knew.
        """
        self._sigmas, self._abort_after = sigmas, abort_after
        self.recent, self.in_a_row = progress.recent, progress.skipped_in_a_row

    def objection(self, loss: float, grad_norm: float) -> str:
        """Why the step must not be applied, in a few words; empty: it may."""
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

    def note(self, loss: float, grad_norm: float, objection: str, step: int) -> None:
        """Take a judged step into account.

        Raises:
            TrainingError: too many in a row were skipped.
        """
        if not objection:
            self.in_a_row = 0
            if self._sigmas is not None:
                self.recent = (*self.recent, (loss, grad_norm))[-WINDOW:]
            return
        self.in_a_row += 1
        if self.in_a_row >= self._abort_after:
            raise TrainingError(
                f"step {step}: {objection}; {self.in_a_row} steps in a row were skipped (run.abort_after_skips), so "
                "training does not recover by itself: lower optim.lr, or look at the samples in events.jsonl"
            )
