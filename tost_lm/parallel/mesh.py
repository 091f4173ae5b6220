"""The device mesh: tensor, sequence and data axes, from megatron-core's process groups; and the model's collectives,
each over an explicit axis.

They are torch's functional collectives: asynchronous operators of the dispatcher. So tests can count them, and
selective activation checkpointing keeps their results. (Recomputation does repeat megatron-core's own collectives.)
"""

import socket
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from tost_lm.parallel import ParallelConfig
from tost_lm.parallel.agreement import all_gather_object
from tost_lm.parallel.world import World
from tost_lm.torch_internals import FUNCTIONAL_COLLECTIVES

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


Pending = Callable[[], Tensor]


def all_gather(x: Tensor, axis: Axis) -> Pending:
    """Start gathering x, equally shaped on all R ranks. The returned function waits for the result [R, …]."""
    gathered = FUNCTIONAL_COLLECTIVES.all_gather_into_tensor(x.contiguous(), axis.size, axis.group.group_name)
    return lambda: FUNCTIONAL_COLLECTIVES.wait_tensor(gathered).view(axis.size, *x.shape)


def all_to_all(x: Tensor, sent: Sequence[int], received: Sequence[int], axis: Axis) -> Tensor:
    """sent[r] of the rows of x [sum(sent), …] go to rank r, received[r] come from it: [sum(received), …], by rank."""
    exchanged = FUNCTIONAL_COLLECTIVES.all_to_all_single(x.contiguous(), [*received], [*sent], axis.group.group_name)
    return FUNCTIONAL_COLLECTIVES.wait_tensor(exchanged)


def reduce_scatter(x_R: Tensor, axis: Axis) -> Tensor:
    """The sum over ranks of row r of x_R [R, …], on rank r: […]."""
    scattered = FUNCTIONAL_COLLECTIVES.reduce_scatter_tensor(
        x_R.flatten(0, 1).contiguous(), "sum", axis.size, axis.group.group_name
    )
    return FUNCTIONAL_COLLECTIVES.wait_tensor(scattered).view(x_R.shape[1:])


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """The sum over ranks. A single rank communicates nothing, so any device works."""
    if axis.size == 1:
        return x
    return FUNCTIONAL_COLLECTIVES.wait_tensor(
        FUNCTIONAL_COLLECTIVES.all_reduce(x.contiguous(), "sum", axis.group.group_name)
    )


def broadcast(x: Tensor, source: int, axis: Axis) -> None:
    """Overwrite x with that of rank `source`, in place, so not as a functional collective."""
    if axis.size > 1 and x.numel():
        dist.broadcast(x, group=axis.group, group_src=source)


def _keep(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    is_collective = operator.namespace == FUNCTIONAL_COLLECTIVES.name
    return CheckpointPolicy.MUST_SAVE if is_collective else CheckpointPolicy.PREFER_RECOMPUTE


keep_received = partial(create_selective_checkpoint_contexts, _keep)
"""`context_fn` of `torch.utils.checkpoint.checkpoint(…, use_reentrant=False)`: results of collectives are kept."""
