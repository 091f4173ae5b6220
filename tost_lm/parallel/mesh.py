"""The device mesh: tensor, sequence and data axes, from megatron-core's process groups."""

import socket
import warnings
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tost_lm.parallel.agreement import all_gather_object
from tost_lm.parallel.config import ParallelConfig
from tost_lm.parallel.world import World

# Optional for megatron-core.
warnings.filterwarnings("ignore", message=".*Apex are not installed.*")


class Axis(NamedTuple):
    """A process group and this rank's position in it."""

    rank: int
    size: int
    group: Any
    """torch.distributed.ProcessGroup."""


class Mesh(NamedTuple):
    """Ranks = tensor × sequence × data; tensor varies fastest, then sequence."""

    tensor: Axis
    """Ranks with different heads, MLP channels and words of the vocabulary, and the same tokens."""
    sequence: Axis
    """Ranks with different tokens of the same sequences."""
    data: Axis
    """Ranks with different sequences."""
    replicas: Axis
    """data × sequence: ranks with the same weights. Gradients are averaged and ZeRO partitions over them."""
    device: torch.device
    node: Axis
    """Ranks on the same host."""


def build_mesh(world: World, parallel: ParallelConfig, hosts: Sequence[str] | None = None) -> Mesh:
    """The axes of this rank; the process group must be initialized.

    Pure data parallelism does not import megatron-core, which takes seconds.

    Args:
        hosts: the host of each rank; None: they are gathered.

    Raises:
        ConfigError: tensor × sequence does not divide the world size.
    """
    data = parallel.data_ranks(world.size)
    if parallel.tensor * parallel.sequence == 1:
        whole, alone = Axis(world.rank, data, dist.group.WORLD), Axis(0, 1, None)
        return Mesh(alone, alone, whole, whole, world.device, _node(world, hosts))
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        context_parallel_size=parallel.sequence,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=world.timeout / timedelta(minutes=1),  # pyright: ignore[reportArgumentType]
    )
    return Mesh(
        tensor=_axis(parallel_state.get_tensor_model_parallel_group()),
        sequence=_axis(parallel_state.get_context_parallel_group()),
        data=_axis(parallel_state.get_data_parallel_group()),
        replicas=_axis(parallel_state.get_data_parallel_group(with_context_parallel=True)),
        device=world.device,
        node=_node(world, hosts),
    )


def deepspeed_mpu(mesh: Mesh) -> SimpleNamespace:
    """The axes for DeepSpeed: tensor is its model parallelism, data × sequence its data parallelism.

    It has no get_sequence_… functions: with them, ZeRO 3 partitions over data alone and scales gradients wrongly.
    """
    return SimpleNamespace(
        get_model_parallel_rank=lambda: mesh.tensor.rank,
        get_model_parallel_world_size=lambda: mesh.tensor.size,
        get_model_parallel_group=lambda: mesh.tensor.group,
        get_data_parallel_rank=lambda: mesh.replicas.rank,
        get_data_parallel_world_size=lambda: mesh.replicas.size,
        get_data_parallel_group=lambda: mesh.replicas.group,
    )


def _axis(group: Any) -> Axis:
    return Axis(dist.get_rank(group), dist.get_world_size(group), group)


def _node(world: World, hosts: Sequence[str] | None) -> Axis:
    hosts = hosts or all_gather_object(socket.gethostname())
    nodes = [[rank for rank, other in enumerate(hosts) if other == host] for host in dict.fromkeys(hosts)]
    if len(nodes) == 1:
        return Axis(world.rank, world.size, dist.group.WORLD)
    return _axis(dist.new_subgroups_by_enumeration(nodes, timeout=world.timeout)[0])
