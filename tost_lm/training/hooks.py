"""What happens after a step beside training itself: all ranks call the hooks alike, in the order of `build_hooks`."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from tost_lm.parallel.checksums import Checksums
from tost_lm.parallel.heartbeat import Heartbeat
from tost_lm.parallel.mesh import Mesh
from tost_lm.parallel.world import max_over_ranks
from tost_lm.training.checkpoint import CheckpointWriter
from tost_lm.training.config import PretrainConfig
from tost_lm.training.departure import REASONS, Departure
from tost_lm.training.guard import Guard
from tost_lm.training.metrics import Metrics, Silence
from tost_lm.training.profiling import Profiler
from tost_lm.training.progress import Progress
from tost_lm.training.step import Outcome
from tost_lm.training.validation import Validation


class Run:
    """What hooks know of a run, and may change."""

    def __init__(
        self, config: PretrainConfig, engine: Any, progress: Progress, metrics: Metrics | Silence, heart: Heartbeat
    ) -> None:
        self.config, self.engine, self.metrics, self.heart = config, engine, metrics, heart
        self.progress = replace(progress, wandb_run_id=metrics.wandb_run_id)
        """Up to the step that hooks are called after, that included."""
        self.outcome, self.lr = Outcome(0.0, 0.0, ""), 0.0
        """Of this step."""
        self.leaving = ""
        """Why the run ends after this step, before config.last_step; empty: it does not."""

    def take(self, outcome: Outcome, lr: float) -> None:
        """Count a step."""
        self.outcome, self.lr = outcome, lr
        updates = self.progress.updates + (not outcome.objection)
        self.progress = replace(self.progress, step=self.progress.step + 1, updates=updates)

    @property
    def is_over(self) -> bool:
        return bool(self.leaving) or self.progress.step >= self.config.last_step


class Hook(Protocol):
    """Something that is done after steps."""

    def after_step(self, run: Run) -> None: ...


class Evaluation(Protocol):
    """Measures a model while it is trained; what and how is not known here."""

    @property
    def facts(self) -> Mapping[str, str]:
        """What all ranks must agree on, by name."""
        ...

    def measure(self, engine: Any, mesh: Mesh, beat: Callable[[], None]) -> list[dict[str, Any]]:
        """A row for each protocol, the same on all ranks, which all call it: `protocol`, `headline` (which of the
        figures is told), and figures by name. `beat` is called often enough for a rank that goes on."""
        ...


def build_hooks(
    guard: Guard,
    checksums: Checksums,
    profiler: Profiler,
    measuring: Sequence[Hook],
    departure: Departure,
    writer: CheckpointWriter,
) -> list[Hook]:
    """In the order in which they are called: a checkpoint holds what those before it found out."""
    first: list[Hook] = [SumUp(checksums), Judge(guard), Tell(), Profile(profiler)]
    return [*first, *measuring, Leave(departure, writer), Save(checksums, writer)]


class SumUp:
    """Looks for bits that changed by themselves."""

    def __init__(self, checksums: Checksums) -> None:
        self._checksums = checksums

    def after_step(self, run: Run) -> None:
        if run.outcome.objection:
            self._checksums.check()  # a flipped bit may be why
        self._checksums.after_update(run.progress.step)


class Judge:
    """Counts skipped steps, tells of them, and ends a run that applies none any more."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def after_step(self, run: Run) -> None:
        step, (loss, grad_norm, objection) = run.progress.step, run.outcome
        if objection:
            sequences = run.config.train.batch_sequences
            samples = [(step - 1) * sequences, step * sequences - 1]
            run.metrics.say(f"step {step} skipped: {objection}; samples {samples[0]}-{samples[1]}")
            run.metrics.event(step, "skipped", why=objection, samples=samples)
        self._guard.note(loss, grad_norm, objection, step)
        run.progress = replace(run.progress, recent=self._guard.recent, skipped_in_a_row=self._guard.in_a_row)


class Tell:
    """The line and the row of metrics."""

    def after_step(self, run: Run) -> None:
        step = run.progress.step
        if step % run.config.run.log_every == 0 or step in (1, run.config.train.steps):
            run.metrics.step(step, run.outcome.loss, run.lr, run.outcome.grad_norm)


class Profile:
    """A trace of some steps."""

    def __init__(self, profiler: Profiler) -> None:
        self._profiler = profiler

    def after_step(self, run: Run) -> None:
        self._profiler.after_step(run.progress.step)


class Validate:
    """The loss on held-out documents."""

    def __init__(self, validation: Validation) -> None:
        self._validation = validation

    def after_step(self, run: Run) -> None:
        step, every = run.progress.step, run.config.validation.every
        if step % (every or 1) == 0 or step == run.config.train.steps:
            run.heart.beat(step, "validation")
            with run.metrics.paused():
                row = self._validation.measure(run.engine)
            run.metrics.validation({"step": step, **row})
            run.progress = replace(run.progress, validation_loss=row["loss"])


class Evaluate:
    """The figures on test sets."""

    def __init__(self, evaluation: Evaluation, mesh: Mesh) -> None:
        self._evaluation, self._mesh = evaluation, mesh

    def after_step(self, run: Run) -> None:
        step, every = run.progress.step, run.config.evaluation.every
        if step % (every or 1) == 0 or step == run.config.train.steps:
            with run.metrics.paused():
                rows = self._evaluation.measure(run.engine, self._mesh, lambda: run.heart.beat(step, "validation"))
            for row in rows:
                run.metrics.evaluation({"step": step, **row})


def reason_to_leave(departure: Departure, seconds_needed: float) -> str:
    """Of any rank, the same on all of them."""
    return REASONS[max_over_ranks(departure.wish(seconds_needed))]


class Leave:
    """Lets all ranks leave after the same step when one of them has a reason to."""

    def __init__(self, departure: Departure, writer: CheckpointWriter) -> None:
        self._departure, self._writer = departure, writer
        self._since, self._longest_step = time.monotonic(), 0.0

    def after_step(self, run: Run) -> None:
        now = time.monotonic()
        self._longest_step, self._since = max(self._longest_step, now - self._since), now
        # What is being written must be finished, and then the last step be saved.
        run.leaving = reason_to_leave(self._departure, self._longest_step + 2 * self._writer.save_seconds)


class Save:
    """Checkpoints, at their times and when the run is over."""

    def __init__(self, checksums: Checksums, writer: CheckpointWriter) -> None:
        self._checksums, self.writer = checksums, writer

    def after_step(self, run: Run) -> None:
        self.writer.poll()
        step = run.progress.step
        if step % run.config.checkpoint.every == 0 or run.is_over:
            run.heart.beat(step, "saving")
            with run.metrics.paused():
                self._checksums.check()  # what is damaged must not become the checkpoint to go back to
                self.writer.save(run.progress)
