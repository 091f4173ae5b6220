"""One optimizer step on the micro-batches of this rank."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from tost_lm.data.prefetch import MicroBatch
from tost_lm.ops.cross_entropy import IGNORED_LABEL
from tost_lm.ops.layout import to_device
from tost_lm.parallel.engine import Engine
from tost_lm.parallel.graceful_stop import StopOfRanks
from tost_lm.parallel.mesh import all_reduce
from tost_lm.pretrain.tiled import Tiling, forward_and_backward


class Outcome(NamedTuple):
    """Result of a step, the same on every rank."""

    scalars: dict[str, float]
    """`LMOutput.scalars` of the global batch: `loss` in nats per labelled token, and other numbers by name."""
    grad_norm: float
    """Global, before clipping."""
    reason_to_skip: str
    """Why weights and optimizer did not change; empty: the step was applied."""
    stop_reason: str = ""
    """Why the run stops after it, one of `graceful_stop.REASONS`; empty: it continues."""
    flops: float = 0.0
    """Of the global batch."""
    sums: tuple[float, ...] = ()
    """Of the `numbers` of all ranks."""

    @property
    def loss(self) -> float:
        return self.scalars["loss"]


def train_step(
    engine: Engine,
    micro_batches: Sequence[MicroBatch],
    tiling: Tiling,
    lr: float,
    reason_to_skip: Callable[[float, float], str] = lambda loss, grad_norm: "",
    before_update: Callable[[], None] = lambda: None,
    before_tile: Callable[[], None] = lambda: None,
    stop: StopOfRanks | None = None,
    flops: float = 0.0,
    numbers: Sequence[float] = (),
) -> Outcome:
    """One optimizer step on this rank's tokens: the columns of each row that `tiling` assigns to it.

    Args:
        reason_to_skip: why not to apply the step, given loss and gradient norm; equal on all ranks. Empty: apply it.
        before_update: called between the last backward and the update.
        before_tile: called before each forward of a tile.
        stop: compares the ranks between micro-batches and at the end. The host reads what it found between two of them
            when the next one is in the GPU's queue, and then may abandon the step without an update.
        flops: of the rows of these micro-batches, for `Outcome.flops`.
        numbers: as many on each rank, for `Outcome.sums`.

    Raises:
        StopRequestedError: the step was abandoned.
    """
    mesh = engine.mesh
    labels_here = torch.stack([(batch.labels != IGNORED_LABEL).sum() for batch in micro_batches]).sum()
    labels = all_reduce(labels_here, mesh.replicas)
    label_count = labels.clamp(min=1) / (mesh.replicas.size * len(micro_batches))
    found: list[Mapping[str, Tensor]] = []
    end_check: Callable[[], None] = lambda: None
    for batch in micro_batches:
        ends_step = len(found) + 1 == len(micro_batches)
        found.append(forward_and_backward(engine, batch, label_count, tiling, before_tile, ends_step=ends_step))
        end_check()
        if stop and len(found) < len(micro_batches):
            end_check = stop.begin_check()
    means = torch.stack([torch.stack([*scalars.values()]) for scalars in found]).mean(0)
    others = torch.tensor([flops, *numbers, *(stop.votes_of_step() if stop else [])], dtype=means.dtype)
    of_rank = [means, labels_here.to(means.dtype)[None], to_device(others, means.device)]
    # Tensor ranks have the same loss, but all must decide alike, even if one of them computed a wrong one.
    totals = all_reduce(all_reduce(torch.cat(of_rank), mesh.replicas), mesh.tensor)
    before_update()

    @cache
    def results() -> list[float]:
        return totals.tolist()

    def scalars() -> dict[str, float]:
        ranks = mesh.replicas.size * mesh.tensor.size
        return {name: total / ranks for name, total in zip(found[0], results(), strict=False)}

    def reason(norm: float) -> str:
        if not results()[len(found[0])]:
            return "no token of the batch counts in the loss"
        return reason_to_skip(scalars()["loss"], norm)

    # A device computes scalars and norm before the host waits for either.
    grad_norm = engine.update(lr, lambda norm: not reason(norm))
    unusable = "" if math.isfinite(grad_norm) else f"gradient norm is {grad_norm}"
    _, all_flops, *rest = results()[len(found[0]) :]
    sums, votes = rest[: len(numbers)], rest[len(numbers) :]
    stop_reason = stop.reason_of(votes) if stop else ""
    skipped = reason(grad_norm) or unusable
    all_flops /= mesh.sequence.size * mesh.tensor.size
    return Outcome(scalars(), grad_norm, skipped, stop_reason, all_flops, tuple(sums))
