"""Whether a run fits the memory of its nodes, and the nearest settings that do."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from tost_lm.config import differences, leaves
from tost_lm.errors import ConfigError
from tost_lm.optim.interface import optimizer_of
from tost_lm.parallel.settings import obstacle_to_tensor_ranks
from tost_lm.pretrain.plan.activations import ELEMENT_BYTES
from tost_lm.pretrain.plan.memory import (
    checkpoint_bytes,
    largest_tile,
    parameters_per_rank,
    peak_moment,
    weights_and_optimizer,
)
from tost_lm.pretrain.plan.settings import PlanConfig
from tost_lm.pretrain.plan.traffic import tiles


def host_bytes(config: PlanConfig) -> float:
    """Host memory of the node with rank 0: the copy for an asynchronous save, and offloaded state."""
    copy = checkpoint_bytes(config) if config.checkpoint.asynchronous else 0
    if config.parallel.offload == "none":
        return copy
    _, optimizer = weights_and_optimizer(config, config.cluster.ranks)
    partition = parameters_per_rank(config) * config.parallel.tensor / config.cluster.ranks
    weights = ELEMENT_BYTES[config.train.dtype] * partition if config.parallel.offload == "all" else 0
    return copy + config.cluster.gpus_per_node * (optimizer + 4 * partition + weights)


def gpu_bytes(config: PlanConfig) -> float:
    """Peak memory of a GPU, with `cluster.reserved_gb`."""
    return peak_moment(config, config.cluster.ranks).total + config.cluster.reserved_gb * 1e9


def complete(config: PlanConfig) -> PlanConfig:
    """The configuration for all GPUs of the cluster, with a number for memory.tile_tokens = auto.

    Raises:
        ConfigError: the GPUs cannot share the batch, or no tile fits.
    """
    cluster = config.cluster
    try:
        config.accumulation(cluster.ranks)
    except ConfigError as error:
        raise ConfigError(
            f"{error}, or another cluster: it has cluster.nodes {cluster.nodes} × cluster.gpus_per_node "
            f"{cluster.gpus_per_node}"
        ) from None
    return _with_largest_tile(config) if config.memory.tile_tokens == "auto" else config


def _with_largest_tile(config: PlanConfig) -> PlanConfig:
    cluster = config.cluster
    return largest_tile(config, cluster.ranks, (cluster.memory_gb - cluster.reserved_gb) * 1e9)


def memory_problem(config: PlanConfig) -> str | None:
    """The memory that is too small, and the nearest settings that fit; None: the plan fits."""
    cluster = config.cluster
    if gpu_bytes(config) > cluster.memory_gb * 1e9:
        problem = f"a GPU needs {gpu_bytes(config) / 1e9:.1f} GB, more than cluster.memory_gb {cluster.memory_gb:g}"
        for changes, other in alternatives(config):
            if gpu_bytes(other) <= cluster.memory_gb * 1e9:
                return f"{problem}; set {changes} ({gpu_bytes(other) / 1e9:.1f} GB)"
        return (
            f"{problem}, and no micro-batch size, ZeRO stage, activation checkpointing, tiles, sequence or tensor "
            f"ranks on {cluster.ranks} GPUs fit; raise cluster.nodes or choose larger GPUs"
        )
    if host_bytes(config) > cluster.host_memory_gb * 1e9:
        problem = f"{host_bytes(config) / 1e9:.0f} GB, more than cluster.host_memory_gb {cluster.host_memory_gb:g}"
        return f"a node needs {problem}; set checkpoint.asynchronous=false or parallel.offload=none"
    return None


def alternatives(config: PlanConfig) -> Iterator[tuple[str, PlanConfig]]:
    """Overrides that reduce memory and the resulting settings, the cheapest first.

    The order is a smaller micro-batch, a higher ZeRO stage, MLP tiles of a quarter of a row, activation checkpointing,
    tiles, more sequence ranks, more tensor ranks.
    """
    train, parallel, ranks, optimizer = config.train, config.parallel, config.cluster.ranks, optimizer_of(config.optim)
    tensors = [n for n in range(parallel.tensor, config.cluster.gpus_per_node + 1) if n % parallel.tensor == 0]
    sequences = [n for n in range(parallel.sequence, train.seq_len + 1) if n % parallel.sequence == 0]
    for tensor, sequence in ((t, s) for t in tensors for s in sequences if ranks % (t * s) == 0):
        if obstacle_to_tensor_ranks(config.model, tensor) or (train.compile and tensor > 1):
            continue
        tiled = tiles(config) > 1
        stages = range(parallel.zero_stage, 3 if tiled or train.compile else 4)
        for stage in (stage for stage in stages if not optimizer.obstacle(tensor, stage)):
            for micro_batch in range(train.micro_batch_size, 0, -1):
                other = _changed(
                    config,
                    train={"micro_batch_size": micro_batch},
                    parallel={"zero_stage": stage, "sequence": sequence, "tensor": tensor},
                )
                changes = [line.split(": ")[0] for line in differences(config, other)]
                if changes and _batch_is_divisible(other):
                    new = dict(leaves(other.model_dump()))
                    yield " ".join(f"{path}={new[path]}" for path in changes), other
        if (tensor, sequence) != (parallel.tensor, parallel.sequence):
            continue
        if config.memory.activation_checkpointing == "none" and _batch_is_divisible(config):
            if not config.memory.mlp_tile_tokens:
                tile = -(-train.seq_len // (4 * parallel.sequence))
                yield f"memory.mlp_tile_tokens={tile}", _changed(config, memory={"mlp_tile_tokens": tile})
            other = _changed(config, memory={"activation_checkpointing": "full"})
            yield "memory.activation_checkpointing=full", other
        if not tiled and parallel.zero_stage < 3 and not (train.compile and config.model.kept_tokens is None):
            with suppress(ConfigError):
                if _batch_is_divisible(config):
                    other = _with_largest_tile(config)
                    yield f"memory.tile_tokens={other.memory.tile_tokens}", other


def _changed(config: PlanConfig, **sections: dict[str, Any]) -> PlanConfig:
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    )


def _batch_is_divisible(config: PlanConfig) -> bool:
    try:
        return config.micro_batches > 0
    except ConfigError:
        return False
