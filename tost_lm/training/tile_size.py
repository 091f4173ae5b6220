"""How rows are cut into tiles, and how large tiles can be."""

import os

import psutil
import torch

from tost_lm.parallel.mesh import Mesh
from tost_lm.parallel.world import World, max_over_ranks
from tost_lm.training.config import PretrainConfig
from tost_lm.training.plan_memory import largest_tile
from tost_lm.training.tiled import Tiling, tile

USABLE = 0.8
"""Of the free memory: the rest is for what no formula counts."""


def tiling_of(config: PretrainConfig, mesh: Mesh) -> Tiling:
    """As the settings say; memory.tile_tokens = auto must have its number already (`with_tile_size`).

    Raises:
        ConfigError: a tile has fewer tokens than there are sequence ranks.
    """
    assert config.memory.tile_tokens != "auto"
    truncated = config.train.truncate_tokens is not None
    tile_tokens = config.train.truncate_tokens or config.memory.tile_tokens
    on_host = config.memory.boundary_states == "host"
    return tile(mesh, config.row_tokens, tile_tokens, truncated=truncated, states_on_host=on_host)


def with_tile_size(config: PretrainConfig, world: World) -> PretrainConfig:
    """With a number for memory.tile_tokens = auto, the same on all ranks; to be called before they hold a model.

    Raises:
        ConfigError: the smallest tile is planned to need more than is free on some rank.
    """
    if config.memory.tile_tokens != "auto":
        return config
    free = -max_over_ranks(-free_bytes(world))
    return largest_tile(config, world.size, free * USABLE)


def free_bytes(world: World) -> int:
    """What this rank may take: of its GPU, or its share of the host's free memory."""
    if world.device.type == "cuda":
        return torch.cuda.mem_get_info(world.device)[0]
    return psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
