"""The run folder of a launch: opened with the first lines of the log, closed with the last."""

import shutil
from typing import Any

import torch

from tost_lm.checkpointing.format import Progress
from tost_lm.checkpointing.run_folder import FLIGHT_RECORDER, step_folder
from tost_lm.model.flops import parameters
from tost_lm.optim.settings import warmup_steps
from tost_lm.parallel.mesh import World
from tost_lm.parallel.watchdog import Heartbeat
from tost_lm.pretrain.metrics import Metrics, NullMetrics, write_run_folder
from tost_lm.pretrain.plan.fit import plan_of_run
from tost_lm.pretrain.settings import PretrainConfig
from tost_lm.pretrain.stage_run import StageRun
from tost_lm.pretrain.start import require_same_checkpoints
from tost_lm.pretrain.tiled import Tiling

NEXT_STAGE = "next stage"
"""Why a launch ends, beside the reasons of a graceful stop."""


def open_folder(
    start: StageRun, progress: Progress, world: World, heartbeat: Heartbeat, tiling: Tiling
) -> Metrics | NullMetrics:
    """On rank 0, prepare the run folder and log the first lines."""
    if world.rank > 0:
        return NullMetrics()
    config, stage = start.config, start.stage
    require_same_checkpoints(start)
    kind = world.device.type
    device = torch.cuda.get_device_name(world.device) if kind == "cuda" else kind
    write_run_folder(start.run, world.size, kind, plan_of_run(config, world.size, device))
    if kind == "cuda":
        (config.run_folder / FLIGHT_RECORDER).mkdir(exist_ok=True)  # NCCL writes there and does not create it
    shutil.rmtree(heartbeat.folder, ignore_errors=True)  # of an earlier launch, perhaps with more ranks
    branch = _branch(start)
    metrics = Metrics(config, progress, world.size, world.device, branch)
    if progress.step == stage.first_step and not branch and len(progress.stages) > 1:
        metrics.event(progress.step, "stage", name=stage.name)
    metrics.log(_opening_line(config, world, start, tiling))
    warmup = warmup_steps(config.optim, stage.schedule_steps)
    if warmup >= stage.schedule_steps:
        metrics.log(
            f"warning: optim.warmup_steps {warmup} is not less than the steps, {stage.schedule_steps}: the rate never "
            "reaches optim.lr; lower optim.warmup_steps or leave it out"
        )
    if start.initial_weights and not branch:
        folder, sha256, _ = start.initial_weights
        metrics.event(progress.step, "initial weights", folder=str(folder), manifest_sha256=sha256)
    return metrics


def _branch(start: StageRun) -> dict[str, Any] | None:
    """The record of a launch that starts a branch; None: it does not."""
    folder, sha256, point = start.initial_weights or (None, "", None)
    if point is None:
        return None
    trunk, branch = point.stages[:-1] or point.stages, point.stages[-1]
    data = "continued" if trunk[-1].samples == branch.samples else "changed"
    return {"folder": str(folder), "manifest_sha256": sha256, "data": data}


def log_end(
    config: PretrainConfig, progress: Progress, stop_reason: str, metrics: Metrics | NullMetrics, *, is_last_stage: bool
) -> None:
    """Log how the launch ended, and close the records."""
    step, how = progress.step, "done"
    if stop_reason == NEXT_STAGE:
        how = f"done: stage {progress.stages[-1].name}; the next one starts from its checkpoint"
    elif stop_reason:
        how = f"stopped on {stop_reason} with everything saved; run the same command to resume"
    elif step < config.train.steps or not is_last_stage:
        stop_reason, how = "run.stop_at_step", "stopped at run.stop_at_step"
    if stop_reason:
        metrics.event(step, "stopped", why=stop_reason)
    else:
        metrics.event(step, "done")
    where = step_folder(config.run_folder, step)
    where = where if where.exists() else config.run_folder
    metrics.log(f"{how}: {where}")
    metrics.close()


def _opening_line(config: PretrainConfig, world: World, start: StageRun, tiling: Tiling) -> str:
    how = f"with the weights of {start.weights_from}" if start.weights_from else "from the start"
    if branch := _branch(start):
        how = f"branching from {branch['folder']}, data {branch['data']}"
    if start.resume_from:
        how = f"resuming from {start.resume_from}"
    stage = f"stage {start.stage.name}, " if len(start.records) > 1 or not start.stage.is_last else ""
    return (
        f"{config.run_folder}: {stage}{parameters(config.model).total / 1e6:.2f}M parameters, "
        f"{_ranks(config, world)} on {world.device.type}, {config.train.dtype}, {config.batch_tokens:,} tokens a step, "
        f"{_tiles(tiling)}{how}"
    )


def _tiles(tiling: Tiling) -> str:
    if len(tiling.tiles) == 1:
        return ""
    return f"exactly in {len(tiling.tiles)} tiles of {tiling.tiles[0].split.tokens:,} tokens, "


def _ranks(config: PretrainConfig, world: World) -> str:
    parallel = config.parallel
    if parallel.tensor * parallel.sequence == 1:
        return f"{world.size} ranks" if world.size > 1 else "1 rank"
    data = parallel.data_ranks(world.size)
    return f"{world.size} ranks (tensor {parallel.tensor} × sequence {parallel.sequence} × data {data})"
