"""The pre-training loop: build model, data and hooks, then train step by step; with traces of some steps, for
chrome://tracing and Perfetto.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import deterministic

from tost_lm.checkpointing.format import Progress
from tost_lm.checkpointing.run_folder import FLIGHT_RECORDER, step_folder
from tost_lm.checkpointing.run_lock import run_lock
from tost_lm.checkpointing.writer import CheckpointWriter, RunFiles
from tost_lm.config import to_toml
from tost_lm.data.loader import Corpora
from tost_lm.data.prefetch import prefetched
from tost_lm.errors import ConfigError
from tost_lm.interop.card import model_card
from tost_lm.mixers.registry import FACTS
from tost_lm.model.config import ModelConfig
from tost_lm.model.flops import parameters
from tost_lm.model.transforms import apply_activation_checkpointing, compile_blocks
from tost_lm.optim.interface import optimizer_of
from tost_lm.optim.settings import learning_rate, warmup_steps
from tost_lm.parallel.agreement import require_agreement, settings_as_facts, versions_as_facts
from tost_lm.parallel.apply import checkpoint_context, parallelize
from tost_lm.parallel.checksums import Checksums
from tost_lm.parallel.graceful_stop import GracefulStop, StopRequestedError
from tost_lm.parallel.mesh import Mesh, World, build_mesh, start_world, stop_world
from tost_lm.parallel.watchdog import Heartbeat, watch_ranks
from tost_lm.parallel.zero import allocate_for_engine, build_engine, check_deepspeed
from tost_lm.pretrain import hooks
from tost_lm.pretrain.hooks import Evaluation, Hook, Run, Save, SpikeGuard, StopGracefully, Validation
from tost_lm.pretrain.metrics import Metrics, NullMetrics, write_run_folder
from tost_lm.pretrain.settings import PretrainConfig
from tost_lm.pretrain.start import StartPoint, rename_old_run, require_same_checkpoints, start_engine
from tost_lm.pretrain.step import build_batches, explain_out_of_memory, tiling_of, train_step, with_tile_size
from tost_lm.pretrain.tiled import TiledLM, Tiling
from tost_lm.torch_internals import enable_flight_recorder

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


def train(
    config: PretrainConfig,
    corpora: Corpora,
    start: StartPoint,
    graceful_stop: GracefulStop,
    evaluation: Evaluation | None = None,
) -> str:
    """Train to `train.steps` or `run.stop_at_step`, from the checkpoint of `start` or from step 0.

    Args:
        evaluation: runs every `evaluation.every` steps; None: there is none.

    Returns:
        The reason of a graceful stop, one of `graceful_stop.REASONS`; empty: there was none.

    Raises:
        TrainingError: the run cannot continue, or its last validation loss is not finite.
    """
    enable_flight_recorder(config.run_folder / FLIGHT_RECORDER)
    world = start_world(config.run.device, config.run.timeouts)
    set_matmul_precision(config.train.tf32, world.device)
    heartbeat = Heartbeat(config.run_folder / "heartbeats", world.rank)
    with watch_ranks(heartbeat, config.run.timeouts, graceful_stop.request):
        if config.train.deterministic:
            use_deterministic_kernels(config.model, world.device)
        if config.deepspeed:
            check_deepspeed(config.deepspeed, world.device.type)
        _require_agreement(config, corpora, start, evaluation)
        config = with_tile_size(config, world)
        with run_lock(config.run_folder, world.rank) as check, explain_out_of_memory(config, heartbeat):
            stop_reason = _train_together(config, corpora, start, graceful_stop, evaluation, world, heartbeat, check)
            stop_world()
    return stop_reason


def set_matmul_precision(tf32: bool, device: torch.device) -> None:
    """Set the precision of float32 matrix products in this process, whatever it was before."""
    # On a CPU "high" would change results, too, where the CPU has instructions for it.
    torch.set_float32_matmul_precision("high" if tf32 and device.type == "cuda" else "highest")


def use_deterministic_kernels(model: ModelConfig, device: torch.device) -> None:
    """Let torch, cuBLAS and flash attention add in a fixed order in this process. Without effect on a CPU.

    The kernels of this package have no atomic additions, and none is chosen by its time. torch raises RuntimeError
    where an operation has no deterministic kernel.

    Raises:
        ConfigError: a mixer is not deterministic.
    """
    if device.type == "cpu":
        return
    for letter in dict.fromkeys(model.letters):
        if obstacle := FACTS[letter].obstacle_to_determinism():
            raise ConfigError(f"train.deterministic: {obstacle}; set it to false, or change model.pattern")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read before the first matrix product
    torch.use_deterministic_algorithms(True)
    # Nothing here reads memory that was not written.
    deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def _train_together(
    config: PretrainConfig,
    corpora: Corpora,
    start: StartPoint,
    graceful_stop: GracefulStop,
    evaluation: Evaluation | None,
    world: World,
    heartbeat: Heartbeat,
    check_folder: Callable[[], None],
) -> str:
    mesh = build_mesh(world, config.parallel)
    tiling = tiling_of(config, mesh)
    batches = build_batches(config, corpora, mesh, tiling)
    warn = print if world.rank == 0 else lambda line: None
    engine, progress, start = start_engine(partial(build_training_engine, config, mesh), config, corpora, start, warn)
    missing = dict.fromkeys(block.mixer.missing_kernels() for block in engine.module.blocks)
    for reason in filter(None, missing):
        warn(f"warning: layers of this model are slow here: {reason}")
    guard = SpikeGuard(config.train.skip_spike_sigma, config.run.abort_after_skips, progress)
    checksums = Checksums(engine, config.run.sdc_check_interval)
    profiler = Profiler(config.run.profile_steps, config.run_folder / "profile", world.rank, world.device)
    measuring = _build_measuring(config, corpora, mesh, tiling, evaluation)
    writer = build_writer(engine, config, corpora, check_folder, progress.step)
    stop, save = StopGracefully(graceful_stop, writer, world.size), Save(checksums, writer)
    after_step: list[Hook] = [
        partial(hooks.verify_checksums, checksums), partial(hooks.count_skips, guard), hooks.log_metrics,
        lambda run: profiler.after_step(run.progress.step), *measuring, stop.after_step,
        save.after_step,  # last, so that a checkpoint contains the results of the others
    ]  # fmt: skip
    metrics = _open_folder(config, start, progress, world, heartbeat, tiling)
    check_folder()
    run = Run(config, engine, progress, metrics, heartbeat, stop)

    run.stop_reason = graceful_stop.start_training(stop.reason)  # also a barrier: rank 0 has made the run folder
    data_start = progress.data_start
    todo = range(progress.step - data_start, (progress.step if run.stop_reason else config.last_step) - data_start)
    heartbeat.record(progress.step, "reading")
    with prefetched(batches, todo, config.data.workers, mesh.device, stop.while_waiting) as numbered:
        try:
            for number, micro_batches in numbered:
                step = data_start + number
                heartbeat.record(step, "training")
                profiler.before_step(step + 1)
                lr = learning_rate(step, config.train.steps, config.optim)
                outcome = train_step(
                    engine, micro_batches, tiling, lr, guard.reason_to_skip, checksums.before_update, stop.check
                )
                run.count_step(outcome, lr)
                for hook in after_step:
                    hook(run)
                if run.is_over:
                    break
                heartbeat.record(step + 1, "reading")
        except StopRequestedError as request:
            run.stop_reason = request.reason
            save.after_step(run)

    heartbeat.record(run.progress.step, "leaving")
    writer.finish()
    profiler.close()
    _log_end(run)
    run.progress.require_finite_validation(config.train.steps, config.run_folder)
    return run.stop_reason


def build_training_engine(config: PretrainConfig, mesh: Mesh) -> Any:
    """The model, sharded over ranks, with an optimizer and DeepSpeed. Its weights have no values (`zero.set_state`)."""
    torch.manual_seed(config.train.seed)
    bfloat16 = config.train.dtype == "bfloat16"
    with torch.device("meta"):
        model = TiledLM(config.model, z_loss=config.train.z_loss)
    parallelize(model, mesh, partial(allocate_for_engine, mesh=mesh, parallel=config.parallel, bfloat16=bfloat16))
    apply_activation_checkpointing(
        model,
        activation_checkpointing=config.memory.activation_checkpointing,
        activation_checkpointing_every=config.memory.activation_checkpointing_every,
        mlp_tile_tokens=config.memory.mlp_tile_tokens,
        context_fn=checkpoint_context(mesh),
    )
    if config.train.compile:
        compile_blocks(model)
    return build_engine(
        model,
        optimizer_of(config.optim).build(model, config.optim),
        mesh,
        config.parallel,
        micro_batch_size=config.train.micro_batch_size,
        accumulation=config.accumulation(mesh.tensor.size * mesh.replicas.size),
        grad_clip=config.optim.grad_clip,
        bfloat16=bfloat16,
        deepspeed_settings=config.deepspeed,
    )


def build_writer(
    engine: Any, config: PretrainConfig, corpora: Corpora, check_folder: Callable[[], None], first_step: int = 0
) -> CheckpointWriter:
    """The writer of a run's checkpoints; all ranks call it together. The run starts after `first_step` steps.

    Raises:
        CheckpointError: the disk is too small for the run; on rank 0.
    """
    card = partial(model_card, run=config.run_folder)
    files = RunFiles(config.run_folder, check_folder, to_toml(config), corpora.tokenizer(), card)
    writer = CheckpointWriter(engine, files, config.checkpoint, config.run.timeouts)
    writer.require_disk_space(first_step, config.last_step, keeps_best=config.validation.every is not None)
    return writer


def _require_agreement(
    config: PretrainConfig, corpora: Corpora, start: StartPoint, evaluation: Evaluation | None
) -> None:
    facts = {**settings_as_facts(config), "shards": corpora.fingerprint, "checkpoint": str(start.resume_from)}
    if evaluation:
        facts |= evaluation.facts
    if start.initial_weights:
        facts["initial weights"] = start.initial_weights.manifest_sha256
    require_agreement(
        {**facts, **versions_as_facts()},
        "start all ranks with the same settings, shards, packages and code, from one shared folder",
    )


def _build_measuring(
    config: PretrainConfig, corpora: Corpora, mesh: Mesh, tiling: Tiling, evaluation: Evaluation | None
) -> list[Hook]:
    measuring: list[Hook] = []
    if config.validation.every:
        held_out = build_batches(config, corpora, mesh, tiling, "valid")
        sequences = config.validation.sequences
        validation = Validation(held_out, mesh, tiling, config.train.seq_len, sequences)
        measuring.append(partial(hooks.validate, validation))
    if evaluation:
        measuring.append(partial(hooks.evaluate, evaluation, mesh))
    return measuring


def _open_folder(
    config: PretrainConfig, start: StartPoint, progress: Progress, world: World, heartbeat: Heartbeat, tiling: Tiling
) -> Metrics | NullMetrics:
    """On rank 0, prepare the run folder and log the first lines."""
    if world.rank > 0:
        return NullMetrics()
    require_same_checkpoints(config, start)
    rename_old_run(config, start)
    write_run_folder(config, world.size, world.device.type)
    if world.device.type == "cuda":
        (config.run_folder / FLIGHT_RECORDER).mkdir(exist_ok=True)  # NCCL writes there and does not create it
    rmtree(heartbeat.folder, ignore_errors=True)  # of an earlier launch, perhaps with more ranks
    branch = _branch(start)
    metrics = Metrics(config, progress if progress.step else None, world.size, world.device, branch)
    metrics.log(_opening_line(config, world, start, tiling))
    warmup = warmup_steps(config.optim, config.train.steps)
    if warmup >= config.train.steps:
        metrics.log(
            f"warning: optim.warmup_steps {warmup} is not less than train.steps {config.train.steps}: the rate never "
            "reaches optim.lr; lower optim.warmup_steps or leave it out"
        )
    if start.initial_weights and not branch:
        folder, sha256, _ = start.initial_weights
        metrics.event(progress.step, "initial weights", folder=str(folder), manifest_sha256=sha256)
    return metrics


def _branch(start: StartPoint) -> dict[str, Any] | None:
    """The record of a launch that starts a branch; None: it does not."""
    folder, sha256, point = start.initial_weights or (None, "", None)
    if point is None:
        return None
    data = "from its beginning" if point.data_start == point.step else "continued"
    return {"folder": str(folder), "manifest_sha256": sha256, "data": data}


def _log_end(run: Run) -> None:
    config, step = run.config, run.progress.step
    if run.stop_reason:
        how = f"stopped on {run.stop_reason} with everything saved; run the same command to resume"
        run.metrics.event(step, "stopped", why=run.stop_reason)
    elif step < config.train.steps:
        how = "stopped at run.stop_at_step"
        run.metrics.event(step, "stopped", why="run.stop_at_step")
    else:
        how = "done"
        run.metrics.event(step, "done")
    where = step_folder(config.run_folder, step)
    where = where if where.exists() else config.run_folder
    run.metrics.log(f"{how}: {where}")
    run.metrics.close()


def _opening_line(config: PretrainConfig, world: World, start: StartPoint, tiling: Tiling) -> str:
    how = f"with the weights of {start.weights_from}" if start.weights_from else "from the start"
    if branch := _branch(start):
        how = f"branching from {branch['folder']}, data {branch['data']}"
    if start.resume_from:
        how = f"resuming from {start.resume_from}"
    return (
        f"{config.run_folder}: {parameters(config.model).total / 1e6:.2f}M parameters, {_ranks(config, world)} on "
        f"{world.device.type}, {config.train.dtype}, {config.batch_tokens:,} tokens a step, "
        f"{_tiles(tiling)}{how}"
    )


def _tiles(tiling: Tiling) -> str:
    if len(tiling.tiles) == 1:
        return ""
    return f"exactly in {len(tiling.tiles)} tiles of {tiling.tiles[0].split.tokens:,} tokens, "


def _ranks(config: PretrainConfig, world: World) -> str:
    parallel = config.parallel
    if parallel.tensor * parallel.sequence == 1:
        return f"{world.size} ranks"
    data = parallel.data_ranks(world.size)
    return f"{world.size} ranks (tensor {parallel.tensor} × sequence {parallel.sequence} × data {data})"
