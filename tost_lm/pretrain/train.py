"""The pre-training loop: build, start, then step by step. All ranks execute the same lines in the same order, and
decide by values that are equal on all of them.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tost_lm.checkpointing.run_folder import FLIGHT_RECORDER, HEARTBEATS
from tost_lm.checkpointing.run_lock import run_lock
from tost_lm.checkpointing.uploads import Uploads
from tost_lm.data.prefetch import MicroBatch, prefetched
from tost_lm.model.flops import document_flops
from tost_lm.optim.settings import learning_rate
from tost_lm.parallel.checksums import Checksums
from tost_lm.parallel.graceful_stop import GracefulStop, StopOfRanks, StopRequestedError
from tost_lm.parallel.mesh import World, build_mesh, start_world, stop_world
from tost_lm.parallel.watchdog import Heartbeat, watch_ranks
from tost_lm.pretrain.batches import build_batches, tiling_of
from tost_lm.pretrain.engine import build_training_engine, build_writer, prepare_process, warn_of_slow_layers
from tost_lm.pretrain.folder import NEXT_STAGE, log_end, open_folder
from tost_lm.pretrain.memory_fit import explain_out_of_memory, memory_warning, with_tile_size
from tost_lm.pretrain.profiler import Profiler
from tost_lm.pretrain.rank_times import RankTimes
from tost_lm.pretrain.spikes import SpikeGuard
from tost_lm.pretrain.stage_run import StageRun
from tost_lm.pretrain.start import require_same_start, start_engine
from tost_lm.pretrain.step import train_step
from tost_lm.pretrain.validation import build_validation
from tost_lm.torch_internals import enable_flight_recorder

if TYPE_CHECKING:
    from tost_lm.tasks.in_training import TasksInTraining


def train(start: StageRun, graceful_stop: GracefulStop, evaluation: "TasksInTraining | None" = None) -> str:
    """Train the stage of `start` to its last step or `run.stop_at_step`, from its checkpoint or from step 0.

    Args:
        evaluation: runs every `evaluation.interval` steps; None: there is none.

    Returns:
        Why the launch ended: one of `graceful_stop.REASONS`, or NEXT_STAGE if another stage follows; empty: the run, or
        what this launch does of it, is done.

    Raises:
        TrainingError: the run cannot continue, or its last validation loss is not finite.
    """
    folder, settings = start.config.run_folder, start.config.run
    enable_flight_recorder(folder / FLIGHT_RECORDER)
    world = start_world(settings.device, settings.timeouts)
    heartbeat = Heartbeat(folder / HEARTBEATS, world.rank)
    with watch_ranks(heartbeat, settings.timeouts, graceful_stop.request):
        prepare_process(start.config, world.device)
        require_same_start(start, evaluation.facts if evaluation else {})
        start = start.with_config(with_tile_size(start.config, world))
        if world.rank == 0 and (warning := memory_warning(start.config, world)):
            print(warning, flush=True)
        with run_lock(folder, world.rank), explain_out_of_memory(start.config, heartbeat):
            trainer = Trainer(start, graceful_stop, evaluation, world, heartbeat)
            stop_reason = trainer.train()
            stop_world()
            trainer.writer.finish_uploads(lambda: heartbeat.record(trainer.progress.step, "leaving"))
    return stop_reason


class Trainer:
    """Trains a stage of a run, on this rank."""

    def __init__(
        self,
        start: StageRun,
        graceful_stop: GracefulStop,
        evaluation: "TasksInTraining | None",
        world: World,
        heartbeat: Heartbeat,
    ) -> None:
        """Build what trains, with the values of `start`, and open the run folder."""
        warn = print if world.rank == 0 else lambda line: None
        config, corpora = start.config, start.corpora
        self.config, self.stage, self.evaluation, self.heartbeat = config, start.stage, evaluation, heartbeat
        self.mesh = build_mesh(world, config.parallel)
        self.tiling = tiling_of(config, self.mesh)
        self.batches = build_batches(config, corpora, self.mesh, self.tiling, stages=start.records)
        build = partial(build_training_engine, config, self.mesh)
        self.engine, self.progress, start = start_engine(build, start, warn)
        heartbeat.record(self.progress.step, "building")  # the next call may compile kernels, in minutes
        warn_of_slow_layers(self.engine, warn)
        self.guard = SpikeGuard(config.train.skip_spike_sigma, config.run.abort_after_skips, self.progress)
        self.checksums = Checksums(self.engine, config.run.sdc_check_interval)
        self.times = RankTimes(self.engine.module, self.mesh)
        self.profiler = Profiler(config.run.profile_steps, config.run_folder / "profile", world.rank, world.device)
        self.validation = build_validation(config, corpora, self.mesh, self.tiling)
        upload = config.upload_folder if world.rank == 0 else None
        uploads = Uploads(upload, config.run_folder) if upload else None
        self.writer = build_writer(self.engine, start, self.progress.step, uploads)
        self.document_flops, self.flops = document_flops(config.model), 0.0  # flops: since the last row of metrics
        self.stop = StopOfRanks(graceful_stop, world.size, lambda: self.writer.seconds_to_stop)
        self.metrics = open_folder(start, self.progress, world, heartbeat, self.tiling)
        self.progress = replace(self.progress, wandb_run_id=self.metrics.wandb_run_id)
        self.stop_reason = graceful_stop.start_training(self.stop.reason)  # a barrier, too: the run folder exists

    def train(self) -> str:
        """Train step by step. Returns as `train`."""
        first, last = self.progress.step, self.config.last_step
        todo = range(first, first if self.stop_reason else last)
        self.heartbeat.record(first, "reading")
        workers = self.config.data.workers
        with prefetched(self.batches, todo, workers, self.mesh.device, self.stop.while_waiting) as numbered:
            try:
                for steps_before, micro_batches in numbered:
                    self.step(steps_before + 1, micro_batches)
                    if self.is_over:
                        break
                    self.heartbeat.record(self.progress.step, "reading")
            except StopRequestedError as request:  # the step or the measurement is abandoned
                self.stop_reason = request.reason
                self.writer.poll()
                self.save()

        self.heartbeat.record(self.progress.step, "leaving")
        self.writer.finish()
        self.profiler.close()
        step, config = self.progress.step, self.config
        if step == config.train.steps and step != config.run.stop_at_step and not self.stage.is_last:
            self.stop_reason = self.stop_reason or NEXT_STAGE
        log_end(config, self.progress, self.stop_reason, self.metrics, is_last_stage=self.stage.is_last)
        self.progress.require_finite_validation(self.config.train.steps, self.config.run_folder)
        return self.stop_reason

    def step(self, step: int, micro_batches: list[MicroBatch]) -> None:
        """Train step number `step`, counted from 1, and do what is due after it."""
        config, due = self.config, self.is_due
        self.times.begin_step(time.monotonic() - self.heartbeat.recorded_at)  # which was "reading"
        self.heartbeat.record(step - 1, "training")
        self.profiler.before_step(step)
        if config.data.skips(step):
            self.metrics.skipped(step, "data.skip_steps")
            self.progress = replace(self.progress, step=step)
            self.stop_reason = self.stop.after_step()
        else:
            self.update(step, micro_batches)
        self.profiler.after_step(step)
        if (validation := self.validation) and due(config.validation.interval):
            row = self.measured(lambda beat: validation.measure(self.engine, beat, self.metrics.log))
            self.metrics.validation({"step": step, **row})
            self.progress = replace(self.progress, validation_loss=row["loss"])
        if (evaluation := self.evaluation) and due(config.evaluation.interval):
            for row in self.measured(lambda beat: evaluation.measure(self.engine, beat)):
                self.metrics.evaluation({"step": step, **row})
        self.writer.poll()
        if step % config.checkpoint.interval == 0 or self.is_over:
            self.save()  # last, so that the checkpoint contains all results

    def update(self, step: int, micro_batches: list[MicroBatch]) -> None:
        """Train on the batch of step number `step`, unless it is a spike."""
        config = self.config
        lr = learning_rate(step - 1 - self.stage.schedule_from, self.stage.schedule_steps, config.optim)
        lengths = (length for batch in micro_batches for length in batch.document_lengths(config.train.seq_len))
        flops = sum(map(self.document_flops, lengths))
        is_logged = step % config.run.log_interval == 0 or step in (1, config.train.steps)
        outcome = train_step(
            self.engine, micro_batches, self.tiling, lr, self.guard.reason_to_skip, self.checksums.before_update,
            partial(self.heartbeat.record, step - 1, "training"), self.stop, flops,
            self.times.take() if is_logged else (),
        )  # fmt: skip
        self.flops += outcome.flops
        self.stop_reason = outcome.stop_reason
        if outcome.reason_to_skip:
            self.checksums.check()  # a flipped bit may be the cause
        self.checksums.after_update(step)
        if outcome.reason_to_skip:
            self.metrics.skipped(step, outcome.reason_to_skip)
        self.guard.record(outcome.loss, outcome.grad_norm, outcome.reason_to_skip, step)
        self.progress = replace(
            self.progress, step=step, updates=self.progress.updates + (not outcome.reason_to_skip),
            recent=self.guard.recent, skipped_in_a_row=self.guard.in_a_row,
        )  # fmt: skip
        if is_logged:
            values = {**outcome.scalars, "lr": lr, "grad_norm": outcome.grad_norm}
            self.metrics.step(step, values, self.flops, outcome.sums)
            self.flops = 0.0

    @property
    def is_over(self) -> bool:
        """Whether no step follows."""
        return self.progress.step >= self.config.last_step or bool(self.stop_reason)

    def is_due(self, interval: int | None) -> bool:
        """Whether a measurement is due: at multiples of `interval` and after the last step."""
        return self.progress.step % (interval or 1) == 0 or self.progress.step == self.config.train.steps

    def measured(self, measure: Callable[[Callable[[], None]], Any]) -> Any:
        """The result of `measure`, which calls its argument between micro-batches. Raises StopRequestedError."""

        def beat() -> None:
            self.heartbeat.record(self.progress.step, "validation")
            self.stop.check()

        self.heartbeat.record(self.progress.step, "validation")
        with self.metrics.paused():
            return measure(beat)

    def save(self) -> None:
        """Save a checkpoint, unless there is nothing to save."""
        if self.progress.step:
            self.heartbeat.record(self.progress.step, "saving")
            with self.metrics.paused():
                self.checksums.check()  # a damaged state must not become the checkpoint to resume from
                self.writer.save(self.progress)
