"""Which ranks share what: the axes of a run, from megatron-core's process groups."""

import warnings
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tost_lm.parallel.config import ParallelConfig
from tost_lm.parallel.world import World

# Packages that megatron-core can do without.
warnings.filterwarnings("ignore", message=".*Apex are not installed.*")


class Axis(NamedTuple):
    """This rank's place in one of its groups."""

    rank: int
    size: int
    group: Any
    """torch.distributed.ProcessGroup."""


class Mesh(NamedTuple):
    """Ranks = tensor × sequence × data; rank r stands at (r mod tensor, r div tensor mod sequence, the rest)."""

    tensor: Axis
    """Ranks that hold other heads, channels of the MLP and words of the same model, for the same tokens."""
    sequence: Axis
    """Ranks that hold other tokens of the same sequences."""
    data: Axis
    """Ranks that hold other sequences."""
    replicas: Axis
    """data × sequence: ranks that hold the same weights, over which gradients are averaged and ZeRO partitions."""
    device: torch.device


def build_mesh(world: World, parallel: ParallelConfig) -> Mesh:
    """The axes of this rank; the process group must exist.

    A run over data alone asks megatron-core for nothing: importing it takes seconds.

    Raises:
        ConfigError: tensor × sequence does not divide the world.
    """
    data = parallel.data_ranks(world.size)
    if parallel.tensor * parallel.sequence == 1:
        whole, alone = Axis(world.rank, data, dist.group.WORLD), Axis(0, 1, None)
        return Mesh(alone, alone, whole, whole, world.device)
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        context_parallel_size=parallel.sequence,
        create_gloo_process_groups=False,
    )
    return Mesh(
        tensor=_axis(parallel_state.get_tensor_model_parallel_group()),
        sequence=_axis(parallel_state.get_context_parallel_group()),
        data=_axis(parallel_state.get_data_parallel_group()),
        replicas=_axis(parallel_state.get_data_parallel_group(with_context_parallel=True)),
        device=world.device,
    )


class FlatMpu:
    """The axes as DeepSpeed asks for them: tensor is its model parallelism, data × sequence its data parallelism.

    It has no get_sequence_…: told of a sequence axis, ZeRO 3 partitions over data alone and forgets a factor.
    """

    def __init__(self, mesh: Mesh):
        self._tensor, self._replicas = mesh.tensor, mesh.replicas

    def get_model_parallel_rank(self) -> int:
        return self._tensor.rank

    def get_model_parallel_world_size(self) -> int:
        return self._tensor.size

    def get_model_parallel_group(self) -> Any:
        return self._tensor.group

    def get_data_parallel_rank(self) -> int:
        return self._replicas.rank

    def get_data_parallel_world_size(self) -> int:
        return self._replicas.size

    def get_data_parallel_group(self) -> Any:
        return self._replicas.group


def _axis(group: Any) -> Axis:
    return Axis(dist.get_rank(group), dist.get_world_size(group), group)
