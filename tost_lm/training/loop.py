"""The pre-training loop: build, build, build, run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tost_lm.data.loader import Share, TrainingBatches
from tost_lm.data.mixture import Corpora
from tost_lm.data.prefetch import MicroBatch, prefetched
from tost_lm.model.lm import IGNORED_LABEL, TostLM
from tost_lm.ops.split import SequenceSplit
from tost_lm.optim.adamw import build_adamw, learning_rate
from tost_lm.parallel.agreement import require_agreement, settings_as_facts
from tost_lm.parallel.apply import even_split, parallelize, shard_of
from tost_lm.parallel.collectives import all_reduce
from tost_lm.parallel.failures import naming_lost_ranks
from tost_lm.parallel.mesh import Mesh, build_mesh
from tost_lm.parallel.world import World, mean_over_ranks, start_world, stop_world
from tost_lm.parallel.zero import build_engine
from tost_lm.training import checkpoint
from tost_lm.training.config import PretrainConfig
from tost_lm.training.metrics import Metrics, Silence
from tost_lm.training.run_folder import Claim, set_aside, step_folder, write_run_folder
from tost_lm.version import VERSION


def train(config: PretrainConfig, corpora: Corpora, claim: Claim) -> None:
    """Train from the claimed checkpoint, or from the start, to `train.steps` or `run.stop_step`."""
    world = start_world(config.run.device)
    with naming_lost_ranks():
        _require_agreement(config, corpora, claim)
        mesh = build_mesh(world, config.parallel)
        split = even_split(mesh, config.row_tokens)
        batches = build_batches(config, corpora, mesh, split)
        engine = build_training_engine(config, mesh, claim.resume_from)
        first_step = checkpoint.restore(engine, claim.resume_from) if claim.resume_from else 0
        if world.rank == 0:
            set_aside(config, claim)
            write_run_folder(config, world.size, world.device.type)
        metrics = Metrics(config, first_step) if world.rank == 0 else Silence()
        metrics.say(_opening_line(config, world, claim.resume_from))

        last_step = config.last_step
        with prefetched(batches, range(first_step, last_step), config.data.workers, mesh.device) as steps:
            for step, micro_batches in steps:
                lr = learning_rate(step, config.train.steps, config.optim)
                loss = train_step(engine, micro_batches, split, lr)
                done = step + 1
                if done % config.run.log_every == 0 or done in (1, config.train.steps):
                    metrics.step(done, mean_over_ranks(loss), lr, float(engine.get_global_grad_norm()))
                if done % config.checkpoint.every == 0 or done == last_step:
                    checkpoint.save(engine, step_folder(config.run_folder, done), config.model, done, corpora)
                    checkpoint.prune(step_folder(config.run_folder, done), config.checkpoint.keep)

        outcome = "done" if last_step == config.train.steps else "stopped at run.stop_step"
        metrics.say(f"{outcome}: {step_folder(config.run_folder, last_step)}")
        metrics.close()
        stop_world()


def build_batches(config: PretrainConfig, corpora: Corpora, mesh: Mesh, split: SequenceSplit) -> TrainingBatches:
    """What this rank reads of each step. Raises ConfigError for a corpus that is shorter than a sequence."""
    return TrainingBatches(
        corpora,
        Share(mesh.data.rank, mesh.data.size, (split.start, split.end)),
        packing=config.data.packing,
        seed=config.train.seed,
        batch_sequences=config.train.batch_sequences,
        micro_batch_sequences=config.train.micro_batch_sequences,
        sequence_tokens=config.train.sequence_tokens,
        ignored_label=IGNORED_LABEL,
    )


def build_training_engine(config: PretrainConfig, mesh: Mesh, checkpoint_folder: Path | None) -> Any:
    """The model with a checkpoint's or its seeded initial weights, spread over ranks, AdamW and DeepSpeed around it."""
    torch.manual_seed(config.train.seed)
    model = TostLM(config.model)
    if checkpoint_folder:
        model.load_state_dict(checkpoint.read_weights(checkpoint_folder))
    model = parallelize(model, mesh).to(mesh.device)
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


def train_step(engine: Any, micro_batches: Sequence[MicroBatch], split: SequenceSplit, lr: float) -> torch.Tensor:
    """One optimizer step on this rank's shards of its sequences, as `split` says of each row.

    Returns:
        This rank's part of the loss: its mean over all ranks is the global batch's, in nats per labelled token.
    """
    mesh: Mesh = engine.mesh
    shard = shard_of(mesh, split)
    labels_here = torch.stack([(batch.labels != IGNORED_LABEL).sum() for batch in micro_batches]).sum()
    label_count = all_reduce(labels_here, mesh.replicas) / (mesh.replicas.size * len(micro_batches))
    for group in engine.optimizer.param_groups:
        group["lr"] = lr
    losses = []
    for tokens, labels, cu_seqlens in micro_batches:
        output = engine(
            tokens, labels=labels, cu_seqlens=cu_seqlens, label_count=label_count, output_state=False, shard=shard
        )
        loss = output.loss
        engine.backward(loss)
        engine.step()  # acts after the last micro-batch
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def _require_agreement(config: PretrainConfig, corpora: Corpora, claim: Claim) -> None:
    facts = {**settings_as_facts(config), "shards": corpora.fingerprint, "checkpoint": str(claim.resume_from)}
    require_agreement(
        {**facts, "tost_lm": VERSION, "torch": torch.__version__},
        "start all ranks with the same settings, shards and packages, from one shared folder",
    )


def _opening_line(config: PretrainConfig, world: World, resume_from: Path | None) -> str:
    how = f"resuming from {resume_from}" if resume_from else "from the start"
    with torch.device("meta"):
        parameters = TostLM(config.model).parameter_count()
    return (
        f"{config.run_folder}: {parameters / 1e6:.2f}M parameters (positions apart), {_ranks(config, world)} on "
        f"{world.device.type}, {config.train.dtype}, {config.batch_tokens:,} tokens a step, {how}"
    )


def _ranks(config: PretrainConfig, world: World) -> str:
    parallel = config.parallel
    if parallel.tensor * parallel.sequence == 1:
        return f"{world.size} ranks"
    data = parallel.data_ranks(world.size)
    return f"{world.size} ranks (tensor {parallel.tensor} × sequence {parallel.sequence} × data {data})"
