"""The pre-training loop: build, build, build, run."""

from pathlib import Path
from typing import Any

import torch

from tost_lm.data.mixture import Corpora
from tost_lm.data.prefetch import prefetched
from tost_lm.model.gated import gated_kernels
from tost_lm.model.lm import TostLM
from tost_lm.model.recompute import hold_less
from tost_lm.optim.adamw import build_adamw, learning_rate
from tost_lm.parallel.agreement import require_agreement, settings_as_facts
from tost_lm.parallel.apply import kept_of_blocks, parallelize
from tost_lm.parallel.checksums import Checksums
from tost_lm.parallel.failures import naming_lost_ranks
from tost_lm.parallel.heartbeat import Heartbeat
from tost_lm.parallel.mesh import Mesh, build_mesh
from tost_lm.parallel.world import World, start_world, stop_world
from tost_lm.parallel.zero import build_engine
from tost_lm.training import checkpoint
from tost_lm.training.batches import build_batches
from tost_lm.training.checkpoint import CheckpointWriter
from tost_lm.training.config import PretrainConfig
from tost_lm.training.departure import Departure
from tost_lm.training.guard import Guard
from tost_lm.training.hooks import Evaluate, Evaluation, Hook, Run, Validate, build_hooks, reason_to_leave
from tost_lm.training.lock import only_launch
from tost_lm.training.memory import telling_what_needs_memory
from tost_lm.training.metrics import Metrics, Silence
from tost_lm.training.profiling import Profiler
from tost_lm.training.progress import Progress
from tost_lm.training.run_folder import Claim, require_as_claimed, set_aside, step_folder, write_run_folder
from tost_lm.training.step import train_step
from tost_lm.training.tile_size import tiling_of, with_tile_size
from tost_lm.training.tiled import TiledLM, Tiling
from tost_lm.training.validation import Validation
from tost_lm.version import VERSION


def train(
    config: PretrainConfig,
    corpora: Corpora,
    claim: Claim,
    departure: Departure,
    evaluation: Evaluation | None = None,
) -> str:
    """Train from the claimed checkpoint, or from the start, to `train.steps` or `run.stop_step`.

    Args:
        evaluation: what is measured every `evaluation.every` steps; None: nothing.

    Returns:
        Why the run was left before that, with all steps saved: one of `departure.REASONS`; empty: it was not.
    """
    world = start_world(config.run.device, config.run.timeout_seconds)
    if "G" in config.model.pattern:
        gated_kernels(world.device)  # which may refuse, before anything is written
    heart = Heartbeat(config.run_folder / "heartbeats", world.rank)
    with naming_lost_ranks(heart, config.run.timeout_seconds, departure.ask):
        _require_agreement(config, corpora, claim, evaluation)
        config = with_tile_size(config, world)
        with only_launch(config.run_folder, world.rank), telling_what_needs_memory(config, heart):
            leaving = _train_together(config, corpora, claim, departure, evaluation, world, heart)
            stop_world()
    return leaving


def _train_together(
    config: PretrainConfig,
    corpora: Corpora,
    claim: Claim,
    departure: Departure,
    evaluation: Evaluation | None,
    world: World,
    heart: Heartbeat,
) -> str:
    mesh = build_mesh(world, config.parallel)
    tiling = tiling_of(config, mesh)
    batches = build_batches(config, corpora, mesh, tiling)
    engine = build_training_engine(config, mesh, claim.weights_from)
    progress = Progress(0, 0, shards_fingerprint=corpora.fingerprint, tokenizer_sha256=corpora.tokenizer().sha256)
    if claim.resume_from:
        progress = checkpoint.restore(engine, claim.resume_from)
    guard = Guard(config.train.skip_spikes, config.run.abort_after_skips, progress)
    checksums = Checksums(engine, config.run.check_every)
    profiler = Profiler(config.run.profile_steps, config.run_folder / "profile", world.rank, world.device)
    measuring = _build_measuring(config, corpora, mesh, tiling, evaluation)
    writer = CheckpointWriter(engine, config, corpora)
    hooks = build_hooks(guard, checksums, profiler, measuring, departure, writer)
    run = Run(config, engine, progress, _open_folder(config, claim, progress, world, heart, tiling), heart)

    departure.get_under_way()
    # A meeting, too: from here on rank 0 has made the run folder.
    run.leaving = reason_to_leave(departure, 2 * writer.save_seconds)
    todo = range(progress.step, progress.step if run.leaving else config.last_step)
    with prefetched(batches, todo, config.data.workers, mesh.device) as steps:
        for step, micro_batches in steps:
            heart.beat(step, "training")
            profiler.before_step(step + 1)
            lr = learning_rate(step, config.train.steps, config.optim)
            run.take(train_step(engine, micro_batches, tiling, lr, guard.objection, checksums.before_update), lr)
            for hook in hooks:
                hook.after_step(run)
            if run.is_over:
                break
            heart.beat(step + 1, "reading")

    heart.beat(run.progress.step, "leaving")
    writer.finish()
    profiler.close()
    _say_how_it_ended(run)
    return run.leaving


def build_training_engine(config: PretrainConfig, mesh: Mesh, checkpoint_folder: Path | None) -> Any:
    """The model with a checkpoint's or its seeded initial weights, spread over ranks, AdamW and DeepSpeed around it."""
    torch.manual_seed(config.train.seed)
    model = TiledLM(config.model)
    if checkpoint_folder:
        model.load_state_dict(checkpoint.read_weights(checkpoint_folder))
    model = parallelize(model, mesh).to(mesh.device)
    hold_less(
        model, recompute=config.memory.recompute, mlp_tokens=config.memory.mlp_tokens, context_fn=kept_of_blocks(mesh)
    )
    return build_engine(
        model,
        build_adamw(model, config.optim),
        mesh,
        config.parallel,
        micro_batch_sequences=config.train.micro_batch_sequences,
        accumulation=config.accumulation(mesh.tensor.size * mesh.replicas.size),
        grad_clip=config.optim.grad_clip,
        bfloat16=config.train.dtype == "bfloat16",
    )


def _require_agreement(config: PretrainConfig, corpora: Corpora, claim: Claim, evaluation: Evaluation | None) -> None:
    facts = {**settings_as_facts(config), "shards": corpora.fingerprint, "checkpoint": str(claim.resume_from)}
    if evaluation:
        facts |= evaluation.facts
    if claim.initial_weights:
        facts["initial weights"] = claim.initial_weights.manifest_sha256
    require_agreement(
        {**facts, "tost_lm": VERSION, "torch": torch.__version__},
        "start all ranks with the same settings, shards and packages, from one shared folder",
    )


def _build_measuring(
    config: PretrainConfig, corpora: Corpora, mesh: Mesh, tiling: Tiling, evaluation: Evaluation | None
) -> list[Hook]:
    hooks: list[Hook] = []
    if config.validation.every:
        held_out = build_batches(config, corpora, mesh, tiling, "valid")
        hooks.append(Validate(Validation(held_out, mesh, tiling, config.train.sequence_tokens)))
    if evaluation:
        hooks.append(Evaluate(evaluation, mesh))
    return hooks


def _open_folder(
    config: PretrainConfig, claim: Claim, progress: Progress, world: World, heart: Heartbeat, tiling: Tiling
) -> Metrics | Silence:
    """Let rank 0 take the run folder into use, and say so."""
    if world.rank > 0:
        return Silence()
    require_as_claimed(config, claim)
    set_aside(config, claim)
    write_run_folder(config, world.size, world.device.type)
    heart.remove_ranks_from(world.size)
    metrics = Metrics(config, progress if claim.resume_from else None, world.size, world.device)
    metrics.say(_opening_line(config, world, claim, tiling))
    if claim.initial_weights:
        folder, sha256 = claim.initial_weights
        metrics.event(0, "initial weights", folder=str(folder), manifest_sha256=sha256)
    return metrics


def _say_how_it_ended(run: Run) -> None:
    config, step = run.config, run.progress.step
    how = "done" if step == config.train.steps else "stopped at run.stop_step"
    if run.leaving:
        how = f"left on {run.leaving} with everything saved; the same command goes on"
    where = step_folder(config.run_folder, step) if step else config.run_folder
    run.metrics.event(step, "left" if run.leaving else "done", why=run.leaving)
    run.metrics.say(f"{how}: {where}")
    run.metrics.close()


def _opening_line(config: PretrainConfig, world: World, claim: Claim, tiling: Tiling) -> str:
    begins = f"with the weights of {claim.initial_weights.folder}" if claim.initial_weights else "from the start"
    how = f"resuming from {claim.resume_from}" if claim.resume_from else begins
    with torch.device("meta"):
        parameters = TostLM(config.model).parameter_count()
    return (
        f"{config.run_folder}: {parameters / 1e6:.2f}M parameters (positions apart), {_ranks(config, world)} on "
        f"{world.device.type}, {config.train.dtype}, {config.batch_tokens:,} tokens a step, "
        f"{_tiles(tiling)}{how}"
    )


def _tiles(tiling: Tiling) -> str:
    if len(tiling.tiles) == 1:
        return ""
    exactly = "truncated back-propagation" if tiling.truncated else "exactly"
    return f"{exactly} in {len(tiling.tiles)} tiles of {tiling.tiles[0].split.tokens:,} tokens, "


def _ranks(config: PretrainConfig, world: World) -> str:
    parallel = config.parallel
    if parallel.tensor * parallel.sequence == 1:
        return f"{world.size} ranks"
    data = parallel.data_ranks(world.size)
    return f"{world.size} ranks (tensor {parallel.tensor} × sequence {parallel.sequence} × data {data})"
