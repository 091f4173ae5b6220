"""Whether a run fits the memory of its nodes, and the nearest settings that do."""

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from tost_lm.config import differences, leaves, validate
from tost_lm.errors import ConfigError
from tost_lm.pretrain.plan import memory
from tost_lm.pretrain.plan.activations import tiles
from tost_lm.pretrain.plan.estimate import step_seconds
from tost_lm.pretrain.plan.settings import CLUSTERS, PlanConfig
from tost_lm.pretrain.settings import PretrainConfig


def host_bytes(config: PlanConfig) -> float:
    """Host memory of a node: its part of the copy for an asynchronous save, and what its ranks offload."""
    copy, offloaded = memory.checkpoint_bytes(config) / config.cluster.nodes, 0.0
    if config.parallel.offload != "none":
        weights, optimizer = memory.weights_and_optimizer(config, config.cluster.ranks)
        offloaded += 2 * weights + optimizer  # gradients too
    if config.memory.offload_tile_states and tiles(config) > 1:
        offloaded += memory.tile_states_bytes(config)
    return copy + config.cluster.gpus_per_node * offloaded


def gpu_bytes(config: PlanConfig) -> float:
    """Peak memory of a GPU, with `cluster.reserved_gb`."""
    return memory.peak_moment(config, config.cluster.ranks).total + config.cluster.reserved_gb * 1e9


def complete(config: PlanConfig) -> PlanConfig:
    """The configuration for all GPUs of the cluster, with a number for memory.tile_tokens = auto.

    Raises:
        ConfigError: the GPUs cannot share the batch, or no tile fits.
    """
    config = config.on_ranks(config.cluster.ranks)
    if config.memory.tile_tokens != "auto":
        return config
    try:
        return _with_largest_tile(config)
    except ConfigError as error:
        changes = next(_with_fitting_tiles(config), None)
        fix = f"set {changes}" if changes else "raise cluster.nodes or choose larger GPUs"
        raise ConfigError(f"{str(error).partition(';')[0]}; {fix}") from None


def _with_fitting_tiles(config: PlanConfig) -> Iterator[str]:
    for changes, other in alternatives(config):
        with suppress(ConfigError):
            _with_largest_tile(other)
            yield changes


def _with_largest_tile(config: PlanConfig) -> PlanConfig:
    return memory.largest_tile(config, config.cluster.ranks, config.cluster.memory_gb * 1e9)


def plan_of_run(config: PretrainConfig, ranks: int, device: str) -> dict[str, float]:
    """What the plan says of a run on so many ranks of a device: bytes of its memory at the peak, and, of a GPU with a
    preset, tokens per second. Raises as `complete`."""
    found = {"memory_peak_bytes": memory.peak_moment(config, ranks).total}
    preset = next((preset for preset, figures in CLUSTERS.items() if figures["device"] == device), None)
    if preset:
        on_node = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        cluster = {"preset": preset, "nodes": ranks // on_node, "gpus_per_node": on_node}
        tree = config.model_dump(mode="json", exclude={"model": {"plugins"}, "stages": True})
        planned = validate(PlanConfig, {**tree, "cluster": cluster}, "plan")
        found["tokens_per_second"] = planned.batch_tokens / step_seconds(planned).total
    return found


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
        return f"a node needs {problem}; raise cluster.nodes or set parallel.offload=none"
    return None


def alternatives(config: PlanConfig) -> Iterator[tuple[str, PlanConfig]]:
    """Overrides that reduce memory and the resulting settings, the cheapest first.

    The order is a smaller micro-batch, a higher ZeRO stage, MLP tiles of a quarter of a row, activation checkpointing,
    tiles, more sequence ranks, more tensor ranks.
    """
    train, parallel, ranks = config.train, config.parallel, config.cluster.ranks
    tensors = [n for n in range(parallel.tensor, config.cluster.gpus_per_node + 1) if n % parallel.tensor == 0]
    sequences = [n for n in range(parallel.sequence, train.seq_len + 1) if n % parallel.sequence == 0]
    for tensor, sequence in ((t, s) for t in tensors for s in sequences if ranks % (t * s) == 0):
        for stage in range(parallel.zero_stage, 4):
            layout = {"zero_stage": stage, "sequence": sequence, "tensor": tensor}
            for micro_batch in range(train.micro_batch_size, 0, -1):
                yield from _if_possible(config, train={"micro_batch_size": micro_batch}, parallel=layout)
        if (tensor, sequence) != (parallel.tensor, parallel.sequence):
            continue
        if config.memory.activation_checkpointing == "none":
            if not config.memory.mlp_tile_tokens:
                tile = -(-train.seq_len // (4 * parallel.sequence))
                yield from _if_possible(config, memory={"mlp_tile_tokens": tile})
            yield from _if_possible(config, memory={"activation_checkpointing": "full"})
        if tiles(config) == 1:
            with suppress(ConfigError):
                tile = _with_largest_tile(config).memory.tile_tokens
                yield from _if_possible(config, memory={"tile_tokens": tile})


def _if_possible(config: PlanConfig, **sections: dict[str, Any]) -> Iterator[tuple[str, PlanConfig]]:
    """The overrides and the settings with them, if they change something and a run can have them."""
    other = config.model_copy(
        update={name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    )
    changes, new = differences(config, other), dict(leaves(other.model_dump()))
    with suppress(ConfigError):
        if changes and other.micro_batches and not other.obstacle():
            yield " ".join(f"{path}={new[path]}" for path in (line.split(": ")[0] for line in changes)), other
