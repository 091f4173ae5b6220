"""Hooks after a step, with what they decide by. All ranks call the same hooks in the same order.

Shape suffixes: B rows, T tokens of a row, P ranges of positions.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from statistics import fmean, pstdev
from typing import Any, Protocol

import torch
from torch import Tensor

from tost_lm.checkpointing.format import Progress
from tost_lm.checkpointing.writer import CheckpointWriter
from tost_lm.data.loader import TrainingBatches
from tost_lm.data.prefetch import MicroBatch, micro_batches
from tost_lm.errors import TrainingError
from tost_lm.ops.cross_entropy import IGNORED_LABEL
from tost_lm.ops.positions import position_ends
from tost_lm.parallel.checksums import Checksums
from tost_lm.parallel.graceful_stop import REASONS, GracefulStop, StopRequestedError
from tost_lm.parallel.mesh import Mesh, all_reduce, max_over_ranks
from tost_lm.parallel.watchdog import Heartbeat
from tost_lm.pretrain.metrics import Metrics, NullMetrics
from tost_lm.pretrain.settings import PretrainConfig
from tost_lm.pretrain.step import Outcome
from tost_lm.pretrain.tiled import Tiling

WINDOW = 128
"""Applied steps that a step is compared with; half of them must exist before spikes are detected."""
LOG_EVERY_S = 10.0


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
        """The result and the learning rate of this step."""
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
        """Facts that all ranks must agree on, by name."""
        ...

    def measure(self, engine: Any, mesh: Mesh, beat: Callable[[], None]) -> list[dict[str, Any]]:
        """A row for each task, the same on all ranks, which all call it: `protocol`, `headline` (the metric that
        is logged) and metrics by name. All ranks call `beat` equally often, at least once per micro-batch."""
        ...


def verify_checksums(checksums: Checksums, run: Run) -> None:
    """Detect silent data corruption."""
    if run.outcome.reason_to_skip:
        checksums.check()  # a flipped bit may be the cause
    checksums.after_update(run.progress.step)


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


class Validation:
    """The loss of one batch of held-out documents, the same batch each time."""

    def __init__(self, batches: TrainingBatches, mesh: Mesh, tiling: Tiling, seq_len: int, sequences: int) -> None:
        """`sequences` were requested; `batches` has fewer if one pass over the held-out split has fewer."""
        self._batches, self._mesh, self._tiling = batches, mesh, tiling
        self.position_ends = position_ends(seq_len)
        self._notice = ""
        if batches.samples is not None and batches.samples < sequences:
            self._notice = (
                f"validation.sequences {sequences:,} is more than one pass over the held-out split: using its "
                f"{batches.samples:,} sequences"
            )

    def measure(
        self, engine: Any, beat: Callable[[], None] = lambda: None, log: Callable[[str], None] = print
    ) -> dict[str, Any]:
        """Nats per token, in total and by position in the document, the same on all ranks; they all call it.

        Args:
            beat: called after each micro-batch; may raise.
            log: reports progress every LOG_EVERY_S seconds, and once that there are fewer sequences than requested.
        """
        if self._notice:
            log(self._notice)
            self._notice = ""
        batches = micro_batches(self._batches[0], self._mesh.device)
        ends_P = torch.tensor(self.position_ends, device=self._mesh.device)
        nats_P = torch.zeros(len(ends_P), dtype=torch.float64, device=self._mesh.device)
        count_P = torch.zeros_like(nats_P)
        started = logged = time.monotonic()
        engine.eval()
        with torch.no_grad():
            for done, batch in enumerate(batches, start=1):
                nats_BT, position_BT = self._losses(engine, batch)
                counted_BT = batch.labels != IGNORED_LABEL
                range_of = torch.bucketize(position_BT.expand_as(nats_BT)[counted_BT], ends_P, right=True)
                nats_P.index_add_(0, range_of, nats_BT[counted_BT].double())
                count_P.index_add_(0, range_of, torch.ones_like(range_of, dtype=torch.float64))
                now = time.monotonic()
                if now - logged > LOG_EVERY_S:
                    logged = now
                    left = timedelta(seconds=round((now - started) / done * (len(batches) - done)))
                    log(f"validation: {done} of {len(batches)} micro-batches, ETA {left}")
                beat()
        engine.train()
        nats_P, count_P = all_reduce(torch.stack([nats_P, count_P]), self._mesh.replicas).cpu()
        return {
            "loss": float(nats_P.sum() / count_P.sum()),
            "position_ends": self.position_ends,
            "loss_by_position": [n / c if c else None for n, c in zip(nats_P.tolist(), count_P.tolist(), strict=True)],
            "tokens": int(count_P.sum()),
        }

    def _losses(self, engine: Any, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Nats [B, T] of this rank's tokens, and their positions in their documents, [B, T] or [1, T]."""
        nats_BT = engine(
            batch.tokens, labels=batch.labels, cu_seqlens=batch.cu_seqlens, label_count=1.0, tiling=self._tiling
        ).nats
        column_T = torch.cat([torch.arange(*tile.columns) for tile in self._tiling.tiles])
        if batch.cu_seqlens is not None:
            starts = batch.cu_seqlens.cpu()
            column_T = column_T - starts[torch.bucketize(column_T, starts, right=True) - 1]
        return nats_BT, column_T[None].to(self._mesh.device)


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

    def __init__(self, graceful_stop: GracefulStop, writer: CheckpointWriter, ranks: int) -> None:
        self._graceful_stop, self._writer, self._ranks = graceful_stop, writer, ranks
        self._since, self._longest_step = time.monotonic(), 0.0

    def after_step(self, run: Run) -> None:
        now = time.monotonic()
        self._longest_step, self._since = max(self._longest_step, now - self._since), now
        run.stop_reason = run.stop_reason or self.reason(self._longest_step)

    def check(self) -> None:
        """Called by all ranks between two micro-batches. Raises StopRequestedError."""
        if reason := self.reason():
            raise StopRequestedError(reason)

    def while_waiting(self) -> None:
        """Called by a rank that waits for data. Raises StopRequestedError, but not on several ranks: they wait for this
        one, until it has data or the watchdog ends them."""
        if self._ranks == 1:
            self.check()

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
