"""The tiling of a run, and the largest tile that fits into free memory."""

import os

import psutil
import torch

from tost_lm.parallel.mesh import Mesh
from tost_lm.parallel.world import World, max_over_ranks
from tost_lm.training.config import PretrainConfig
from tost_lm.training.plan_memory import largest_tile
from tost_lm.training.tiled import Tiling, tile

USABLE = 0.8
"""Usable fraction of free memory; the plan does not count all memory."""


def tiling_of(config: PretrainConfig, mesh: Mesh) -> Tiling:
    """The tiling of a configuration that `with_tile_size` returned.

    Raises:
        ConfigError: a tile has fewer tokens than there are sequence ranks.
    """
    assert config.memory.tile_tokens != "auto"
    truncated = config.train.truncate_tokens is not None
    tile_tokens = config.train.truncate_tokens or config.memory.tile_tokens
    on_host = config.memory.offload_tile_states
    return tile(mesh, config.row_tokens, tile_tokens, truncated=truncated, states_on_host=on_host)


def with_tile_size(config: PretrainConfig, world: World) -> PretrainConfig:
    """The configuration with a number for memory.tile_tokens = auto, the same on all ranks. Call it before the model
    is built.

    Raises:
        ConfigError: some rank has less free memory than the smallest tile needs by the plan.
    """
    if config.memory.tile_tokens != "auto":
        return config
    free = -max_over_ranks(-free_bytes(world))
    return largest_tile(config, world.size, free * USABLE)


def free_bytes(world: World) -> int:
    """Free memory of this rank's GPU, or an equal fraction of the host's free memory for each of its ranks."""
    if world.device.type == "cuda":
        return torch.cuda.mem_get_info(world.device)[0]
    return psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
