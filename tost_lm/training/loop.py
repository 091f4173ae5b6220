"""The pre-training loop: build, build, build, run."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tost_lm.data.loader import TrainingWindows
from tost_lm.data.sampler import batch_windows
from tost_lm.data.shards import Shards
from tost_lm.model.lm import TostLM
from tost_lm.optim.adamw import build_adamw, learning_rate
from tost_lm.parallel.world import World, mean_over_ranks, start_world, stop_world
from tost_lm.parallel.zero import build_engine
from tost_lm.training import checkpoint
from tost_lm.training.config import PretrainConfig
from tost_lm.training.metrics import Metrics, Silence
from tost_lm.training.run_folder import Claim, set_aside, step_folder, write_run_folder


def train(config: PretrainConfig, shards: Shards, claim: Claim) -> None:
    """Train from the claimed checkpoint, or from the start, to `train.steps` or `run.stop_step`."""
    world = start_world(config.run.device)
    windows = TrainingWindows(shards, config.train.sequence_tokens)
    engine = build_training_engine(config, world)
    first_step = checkpoint.restore(engine, claim.resume_from) if claim.resume_from else 0
    if world.rank == 0:
        set_aside(config, claim)
        write_run_folder(config, world.size, world.device.type)
    metrics = Metrics(config, first_step) if world.rank == 0 else Silence()
    metrics.say(_opening_line(config, engine, world, claim.resume_from))

    last_step = config.last_step
    for step in range(first_step, last_step):
        lr = learning_rate(step, config.train.steps, config.optim)
        tokens, labels = _share_of_batch(config, windows, step, world)
        loss = train_step(engine, tokens, labels, lr, config.train.micro_batch_sequences)
        done = step + 1
        if done % config.run.log_every == 0 or done in (1, config.train.steps):
            metrics.step(done, mean_over_ranks(loss), lr, float(engine.get_global_grad_norm()))
        if done % config.run.checkpoint_every == 0 or done == last_step:
            checkpoint.save(engine, step_folder(config.run_folder, done), config.model, done, shards)
            checkpoint.prune(step_folder(config.run_folder, done), config.run.keep_checkpoints)

    outcome = "done" if last_step == config.train.steps else "stopped at run.stop_step"
    metrics.say(f"{outcome}: {step_folder(config.run_folder, last_step)}")
    metrics.close()
    stop_world()


def build_training_engine(config: PretrainConfig, world: World) -> Any:
    """The model with its seeded initial weights, AdamW and DeepSpeed around them."""
    torch.manual_seed(config.train.seed)
    model = TostLM(config.model).to(world.device)
    return build_engine(
        model,
        build_adamw(model, config.optim),
        zero_stage=config.parallel.zero_stage,
        micro_batch_sequences=config.train.micro_batch_sequences,
        accumulation=config.accumulation(world.size),
        grad_clip=config.optim.grad_clip,
        bfloat16=config.train.dtype == "bfloat16",
    )


def train_step(
    engine: Any, tokens_BT: torch.Tensor, labels_BT: torch.Tensor, lr: float, micro_batch_sequences: int
) -> torch.Tensor:
    """One optimizer step on this rank's share of the batch; the mean loss of the share, in nats per token."""
    for group in engine.optimizer.param_groups:
        group["lr"] = lr
    losses = []
    for tokens, labels in zip(
        tokens_BT.split(micro_batch_sequences), labels_BT.split(micro_batch_sequences), strict=True
    ):
        loss = engine(tokens, labels=labels).loss
        engine.backward(loss)
        engine.step()  # acts after the last micro-batch
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def _share_of_batch(
    config: PretrainConfig, windows: TrainingWindows, step: int, world: World
) -> tuple[torch.Tensor, torch.Tensor]:
    ids = batch_windows(config.train.seed, step, config.train.batch_sequences, len(windows))
    mine = np.split(ids, world.size)[world.rank]
    tokens, labels = windows.batch(mine)
    return torch.from_numpy(tokens).to(world.device), torch.from_numpy(labels).to(world.device)


def _opening_line(config: PretrainConfig, engine: Any, world: World, resume_from: Path | None) -> str:
    how = f"resuming from {resume_from}" if resume_from else "from the start"
    return (
        f"{config.run_folder}: {engine.module.parameter_count() / 1e6:.2f}M parameters (positions apart), "
        f"{world.size} ranks on {world.device.type}, {config.train.dtype}, {config.batch_tokens:,} tokens a step, {how}"
    )
