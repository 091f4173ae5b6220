"""The batches of this rank, and one optimizer step on its micro-batches, in the memory of the rank: the largest tile
that fits into it, and an out-of-memory error in one line.
"""

import math
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tost_lm.data.loader import BatchShard, Corpora, TrainingBatches
from tost_lm.data.prefetch import MicroBatch
from tost_lm.data.stages import StageRecord
from tost_lm.errors import TrainingError
from tost_lm.ops.cross_entropy import IGNORED_LABEL
from tost_lm.parallel.mesh import Mesh, World, all_reduce, max_over_ranks
from tost_lm.parallel.watchdog import Heartbeat
from tost_lm.pretrain.plan.activations import activation_bytes_per_token, tokens_in_memory
from tost_lm.pretrain.plan.memory import largest_tile, peak_moment, weights_and_optimizer
from tost_lm.pretrain.settings import PretrainConfig
from tost_lm.pretrain.tiled import Tiling, tile

TORCH_MESSAGES = ("can't allocate memory", "bad_alloc", "Cannot allocate memory", "out of memory", "ALLOC_FAILED")
USABLE = 0.8
"""Usable fraction of free memory; the plan does not count all memory."""


def tiling_of(config: PretrainConfig, mesh: Mesh) -> Tiling:
    """The tiling of a configuration that `with_tile_size` returned.

    Raises:
        ConfigError: a tile has fewer tokens than there are sequence ranks.
    """
    memory = config.memory
    assert memory.tile_tokens != "auto"
    return tile(mesh, config.row_tokens, memory.tile_tokens, states_on_host=memory.offload_tile_states)


def with_tile_size(config: PretrainConfig, world: World) -> PretrainConfig:
    """The configuration with a number for memory.tile_tokens = auto, the same on all ranks. Call it before the model
    is built.

    Raises:
        ConfigError: some rank has less free memory than the smallest tile needs by the plan.
    """
    if config.memory.tile_tokens != "auto":
        return config
    free = -max_over_ranks(-_free_bytes(world))
    return largest_tile(config, world.size, free * USABLE)


def memory_warning(config: PretrainConfig, world: World) -> str:
    """A warning if the ranks of a CPU may fill its memory, which Linux answers by killing one of them; else empty."""
    planned, free = peak_moment(config, world.size).total, _free_bytes(world)
    if world.device.type != "cpu" or planned <= free:
        return ""
    return (
        f"warning: each rank needs {planned / 1e9:.1f} GB of memory by the plan, and {free / 1e9:.1f} GB are free: the "
        "system may kill it; lower train.micro_batch_size, or set memory.tile_tokens=auto"
    )


def _free_bytes(world: World) -> int:
    """Free memory of this rank's GPU, or an equal fraction of the host's free memory for each of its ranks."""
    if world.device.type == "cuda":
        return torch.cuda.mem_get_info(world.device)[0]
    import psutil  # of the extra `train`

    return psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", world.size))


@contextmanager
def explain_out_of_memory(config: PretrainConfig, heartbeat: Heartbeat) -> Iterator[None]:
    """Raises TrainingError in place of an out-of-memory error."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        full = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not full and not any(text in str(error) for text in TORCH_MESSAGES):
            raise
        where = f"{heartbeat.last.phase}, step {heartbeat.last.step}"
        raise TrainingError(
            f"rank {heartbeat.last.rank} ({socket.gethostname()}) is out of memory ({where}): {_needs(config)}"
        ) from None


def _needs(config: PretrainConfig) -> str:
    model = sum(weights_and_optimizer(config, int(os.environ.get("WORLD_SIZE", "1")))) / 1e9
    kept = activation_bytes_per_token(config) * tokens_in_memory(config) / 1e9
    rows, tokens = config.train.micro_batch_size, config.tile_tokens // config.parallel.sequence
    if model > kept:
        fix = "use a smaller model (model.width, layers, vocab_size, max_positions) or increase parallelism"
    else:
        fix = (
            "lower train.micro_batch_size or memory.tile_tokens, enable memory.activation_checkpointing, or increase "
            "parallelism"
        )
    return (
        f"weights and optimizer take {model:,.2f} GB, and the activations of {rows} × {tokens} tokens {kept:,.2f} GB; "
        f"{fix} (parallel.sequence, parallel.tensor, parallel.zero_stage); tost plan shows all memory"
    )


def build_batches(
    config: PretrainConfig,
    corpora: Corpora,
    mesh: Mesh,
    tiling: Tiling,
    documents: Literal["train", "valid"] = "train",
    stages: Sequence[StageRecord] = (),
) -> TrainingBatches:
    """This rank's shard of every batch of a run with these stages so far. The held-out split has one batch, number 0.

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
        stages=stages,
    )


class Outcome(NamedTuple):
    """Result of a step, the same on every rank."""

    scalars: dict[str, float]
    """`LMOutput.scalars` of the global batch: `loss` in nats per labelled token, and other numbers by name."""
    grad_norm: float
    """Global, before clipping."""
    reason_to_skip: str
    """Why weights and optimizer did not change; empty: the step was applied."""

    @property
    def loss(self) -> float:
        return self.scalars["loss"]


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
    found: list[Mapping[str, Tensor]] = []
    for batch in micro_batches:
        if found:
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
        found.append(output.scalars)
    means = torch.stack([torch.stack([*scalars.values()]) for scalars in found]).mean(0)
    # Tensor ranks have the same loss, but all must decide alike, even if one of them computed a wrong one.
    totals = all_reduce(all_reduce(means, mesh.replicas), mesh.tensor)
    before_update()

    @cache
    def scalars() -> dict[str, float]:
        ranks = mesh.replicas.size * mesh.tensor.size
        return {name: total / ranks for name, total in zip(found[0], totals.tolist(), strict=True)}

    # A device computes scalars and norm before the host waits for either.
    grad_norm = engine.skippable_step(lambda norm: not reason_to_skip(scalars()["loss"], norm))
    unusable = "" if math.isfinite(grad_norm) else f"gradient norm is {grad_norm}"
    return Outcome(scalars(), grad_norm, reason_to_skip(scalars()["loss"], grad_norm) or unusable)
