"""One optimizer step on this rank's part of a batch."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tost_lm.data.prefetch import MicroBatch
from tost_lm.ops.cross_entropy import IGNORED_LABEL
from tost_lm.parallel.collectives import all_reduce
from tost_lm.parallel.mesh import Mesh
from tost_lm.training.tiled import Tiling


class Outcome(NamedTuple):
    """Of a step, the same on every rank."""

    loss: float
    """Of the global batch, in nats per labelled token."""
    grad_norm: float
    """Global, before clipping."""
    objection: str
    """Why weights and optimizer are as before; empty: the step was applied."""


def train_step(
    engine: Any,
    micro_batches: Sequence[MicroBatch],
    tiling: Tiling,
    lr: float,
    objection: Callable[[float, float], str] = lambda loss, grad_norm: "",
    before_update: Callable[[], None] = lambda: None,
) -> Outcome:
    """One optimizer step on this rank's tokens of its sequences, the stripes of each row that `tiling` says.

    Args:
        objection: what speaks against applying the step, given loss and gradient norm; alike on all ranks.
        before_update: called between the last backward and the update.
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
        loss = engine(
            batch.tokens,
            labels=batch.labels,
            cu_seqlens=batch.cu_seqlens,
            label_count=label_count,
            tiling=tiling,
        ).loss
        engine.backward(loss)
        losses.append(loss.detach())
    # Tensor ranks have the same loss, but all must judge it alike, even if one of them went wrong.
    total = all_reduce(all_reduce(torch.stack(losses).mean(), mesh.replicas), mesh.tensor)
    mean_loss = float(total) / (mesh.replicas.size * mesh.tensor.size)
    before_update()
    grad_norm = engine.updates.take(lambda norm: not objection(mean_loss, norm))
    unusable = "" if math.isfinite(grad_norm) else f"gradient norm is {grad_norm}"
    return Outcome(mean_loss, grad_norm, objection(mean_loss, grad_norm) or unusable)
