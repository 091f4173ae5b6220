"""Hooks after a step. All ranks call the same hooks in the same order."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from tost_lm.checkpointing.format import Progress
from tost_lm.checkpointing.writer import CheckpointWriter
from tost_lm.parallel.checksums import Checksums
from tost_lm.parallel.mesh import Mesh
from tost_lm.parallel.watchdog.heartbeat import Heartbeat
from tost_lm.parallel.world import max_over_ranks
from tost_lm.training.config import PretrainConfig
from tost_lm.training.graceful_stop import REASONS, GracefulStop, StopRequestedError
from tost_lm.training.metrics import Metrics, NullMetrics
from tost_lm.training.spike_guard import SpikeGuard
from tost_lm.training.step import Outcome
from tost_lm.training.validation import Validation


class Run:
    """The state of a run that hooks read and change."""

    def __init__(
        self,
        config: PretrainConfig,
        engine: Any,
        progress: Progress,
        metrics: Metrics | NullMetrics,
        heartbeat: Heartbeat,
        stop: "StopGracefully",
    ) -> None:
        self.config, self.engine, self.metrics, self.heartbeat, self.stop = config, engine, metrics, heartbeat, stop
        self.progress = replace(progress, wandb_run_id=metrics.wandb_run_id)
        """Includes the step that hooks are called after."""
        self.outcome, self.lr = Outcome(0.0, 0.0, ""), 0.0
        """Of this step."""
        self.stop_reason = ""
        """Why the run stops before config.last_step; empty: it does not."""

    def count_step(self, outcome: Outcome, lr: float) -> None:
        self.outcome, self.lr = outcome, lr
        updates = self.progress.updates + (not outcome.reason_to_skip)
        self.progress = replace(self.progress, step=self.progress.step + 1, updates=updates)

    @property
    def is_over(self) -> bool:
        return bool(self.stop_reason) or self.progress.step >= self.config.last_step


Hook = Callable[[Run], None]
"""An action after each step."""


class Evaluation(Protocol):
    """Evaluates a model during training."""

    @property
    def facts(self) -> Mapping[str, str]:
        """What all ranks must agree on, by name."""
        ...

    def measure(self, engine: Any, mesh: Mesh, beat: Callable[[], None]) -> list[dict[str, Any]]:
        """A row for each protocol, the same on all ranks, which all call it: `protocol`, `headline` (the metric that
        is logged) and metrics by name. All ranks call `beat` equally often, at least once per micro-batch."""
        ...


def verify_checksums(checksums: Checksums, run: Run) -> None:
    """Detect silent data corruption."""
    if run.outcome.reason_to_skip:
        checksums.check()  # a flipped bit may be the cause
    checksums.after_update(run.progress.step)


def count_skips(guard: SpikeGuard, run: Run) -> None:
    """Log a skipped step, and end a run that skips too many in a row."""
    step, (loss, grad_norm, reason_to_skip, _) = run.progress.step, run.outcome
    if reason_to_skip:
        sequences, batch = run.config.train.global_batch_size, step - 1 - run.progress.data_start
        samples = [batch * sequences, (batch + 1) * sequences - 1]
        run.metrics.log(f"step {step} skipped: {reason_to_skip}; samples {samples[0]}-{samples[1]}")
        run.metrics.event(step, "skipped", why=reason_to_skip, samples=samples)
    guard.record(loss, grad_norm, reason_to_skip, step)
    run.progress = replace(run.progress, recent=guard.recent, skipped_in_a_row=guard.in_a_row)


def log_metrics(run: Run) -> None:
    """The log line and the row of metrics."""
    step = run.progress.step
    if step % run.config.run.log_every == 0 or step in (1, run.config.train.steps):
        run.metrics.step(step, run.outcome.loss, run.lr, run.outcome.grad_norm, run.outcome.z_loss)


def validate(validation: Validation, run: Run) -> None:
    """Record the loss on held-out documents, unless a graceful stop interrupts the validation."""
    if is_due(run, run.config.validation.every):
        row = measured(run, lambda beat: validation.measure(run.engine, beat, run.metrics.log))
        if row is not None:
            run.metrics.validation({"step": run.progress.step, **row})
            run.progress = replace(run.progress, validation_loss=row["loss"])


def evaluate(evaluation: Evaluation, mesh: Mesh, run: Run) -> None:
    """Record metrics on test sets, unless a graceful stop interrupts the evaluation."""
    if is_due(run, run.config.evaluation.every):
        for row in measured(run, lambda beat: evaluation.measure(run.engine, mesh, beat)) or []:
            run.metrics.evaluation({"step": run.progress.step, **row})


def is_due(run: Run, every: int | None) -> bool:
    """Whether a measurement is due after this step: at multiples of `every` and after the last step."""
    return not run.stop_reason and (
        run.progress.step % (every or 1) == 0 or run.progress.step == run.config.train.steps
    )


def measured(run: Run, measure: Callable[[Callable[[], None]], Any]) -> Any:
    """The result of `measure`, or None after a request to stop. `measure` calls its argument between micro-batches."""

    def beat() -> None:
        run.heartbeat.record(run.progress.step, "validation")
        run.stop.check()

    run.heartbeat.record(run.progress.step, "validation")
    with run.metrics.paused():
        try:
            return measure(beat)
        except StopRequestedError as stop:
            run.stop_reason = stop.reason
            return None


class StopGracefully:
    """Stops all ranks together when one of them has a reason: after a step, or between two micro-batches."""

    def __init__(self, graceful_stop: GracefulStop, writer: CheckpointWriter) -> None:
        self._graceful_stop, self._writer = graceful_stop, writer
        self._since, self._longest_step = time.monotonic(), 0.0

    def after_step(self, run: Run) -> None:
        now = time.monotonic()
        self._longest_step, self._since = max(self._longest_step, now - self._since), now
        run.stop_reason = run.stop_reason or self.reason(self._longest_step)

    def check(self) -> None:
        """Called by all ranks between two micro-batches. Raises StopRequestedError."""
        if reason := self.reason():
            raise StopRequestedError(reason)

    def reason(self, seconds_needed: float = 0.0) -> str:
        """The reason of any rank, the same on all of them; empty: continue.

        Args:
            seconds_needed: time [s] until the next call. The save that is in progress and the last save come on top.
        """
        here = self._graceful_stop.requested(seconds_needed + 2 * self._writer.save_seconds)
        return REASONS[max_over_ranks(REASONS.index(here))]


class Save:
    """Checkpoints, at their interval and when the run is over."""

    def __init__(self, checksums: Checksums, writer: CheckpointWriter) -> None:
        self._checksums, self.writer = checksums, writer

    def after_step(self, run: Run) -> None:
        self.writer.poll()
        step = run.progress.step
        if step and (step % run.config.checkpoint.interval == 0 or run.is_over):
            run.heartbeat.record(step, "saving")
            with run.metrics.paused():
                self._checksums.check()  # a damaged state must not become the checkpoint to resume from
                self.writer.save(run.progress)
