"""The batches of this rank, and one optimizer step on its micro-batches."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tost_lm.data.loader import BatchShard, Corpora, TrainingBatches
from tost_lm.data.prefetch import MicroBatch
from tost_lm.errors import ConfigError
from tost_lm.ops.cross_entropy import IGNORED_LABEL
from tost_lm.parallel.mesh import Mesh, all_reduce
from tost_lm.training.config import PretrainConfig
from tost_lm.training.tiled import Tiling


def build_batches(
    config: PretrainConfig,
    corpora: Corpora,
    mesh: Mesh,
    tiling: Tiling,
    documents: Literal["train", "valid"] = "train",
) -> TrainingBatches:
    """This rank's shard of every batch. The held-out split has one batch, number 0.

    Raises:
        ConfigError: a corpus is shorter than a sequence.
    """
    train = config.train
    return TrainingBatches(
        corpora,
        BatchShard(mesh.data.rank, mesh.data.size, tuple(tile.columns for tile in tiling.tiles)),
        packing=config.data.packing,
        seed=train.seed,
        global_batch_size=train.global_batch_size if documents == "train" else config.validation.sequences,
        micro_batch_size=train.micro_batch_size,
        seq_len=train.seq_len,
        ignored_label=IGNORED_LABEL,
        documents=documents,
    )


def check_vocabulary(config: PretrainConfig, corpora: Corpora) -> None:
    """Raises ConfigError when the shards contain tokens without an embedding."""
    if corpora.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size {config.model.vocab_size} is smaller than the tokenizer's {corpora.vocab_size} pieces: "
            f"set model.vocab_size to at least {corpora.vocab_size}"
        )


class Outcome(NamedTuple):
    """Result of a step, the same on every rank."""

    loss: float
    """Of the global batch, in nats per labelled token, without z-loss."""
    grad_norm: float
    """Global, before clipping."""
    reason_to_skip: str
    """Why weights and optimizer did not change; empty: the step was applied."""
    z_loss: float = 0.0
    """What was added to the loss; per labelled token as well."""


def train_step(
    engine: Any,
    micro_batches: Sequence[MicroBatch],
    tiling: Tiling,
    lr: float,
    reason_to_skip: Callable[[float, float], str] = lambda loss, grad_norm: "",
    before_update: Callable[[], None] = lambda: None,
    check: Callable[[], None] = lambda: None,
) -> Outcome:
    """One optimizer step on this rank's tokens: the columns of each row that `tiling` assigns to it.

    Args:
        reason_to_skip: why not to apply the step, given loss and gradient norm; equal on all ranks. Empty: apply it.
        before_update: called between the last backward and the update.
        check: called between two micro-batches. If it raises, the step is abandoned without an update.
    """
    mesh: Mesh = engine.mesh
    labels_here = torch.stack([(batch.labels != IGNORED_LABEL).sum() for batch in micro_batches]).sum()
    label_count = all_reduce(labels_here, mesh.replicas) / (mesh.replicas.size * len(micro_batches))
    for group in engine.optimizer.param_groups:
        group["lr"] = lr
    losses: list[Tensor] = []
    for batch in micro_batches:
        if losses:
            engine.step()  # does nothing before the last micro-batch
            check()
        output = engine(
            batch.tokens,
            labels=batch.labels,
            cu_seqlens=batch.cu_seqlens,
            label_count=label_count,
            tiling=tiling,
        )
        engine.backward(output.loss)
        losses.append(torch.stack([output.loss.detach() - output.z_loss, output.z_loss]))
    # Tensor ranks have the same loss, but all must decide alike, even if one of them computed a wrong one.
    totals = all_reduce(all_reduce(torch.stack(losses).mean(0), mesh.replicas), mesh.tensor)
    mean_loss, z_loss = (total / (mesh.replicas.size * mesh.tensor.size) for total in totals.tolist())
    before_update()
    grad_norm = engine.skippable_step(lambda norm: not reason_to_skip(mean_loss, norm))
    unusable = "" if math.isfinite(grad_norm) else f"gradient norm is {grad_norm}"
    return Outcome(mean_loss, grad_norm, reason_to_skip(mean_loss, grad_norm) or unusable, z_loss)
