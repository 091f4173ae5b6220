"""Training in the memory of a rank: the largest tile that fits into it, and an out-of-memory error in one line."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tost_lm.errors import TrainingError
from tost_lm.parallel.mesh import World, max_over_ranks
from tost_lm.parallel.watchdog import Heartbeat
from tost_lm.pretrain.plan.activations import activation_bytes_per_token, tokens_in_memory
from tost_lm.pretrain.plan.memory import largest_tile, peak_moment, weights_and_optimizer
from tost_lm.pretrain.settings import PretrainConfig

TORCH_MESSAGES = ("can't allocate memory", "bad_alloc", "Cannot allocate memory", "out of memory", "ALLOC_FAILED")


def with_tile_size(config: PretrainConfig, world: World) -> PretrainConfig:
    """The configuration with a number for memory.tile_tokens = auto, the same on all ranks. Call it before the model
    is built.

    Raises:
        ConfigError: some rank has less free memory than the smallest tile needs by the plan.
    """
    if config.memory.tile_tokens != "auto":
        return config
    return largest_tile(config, world.size, -max_over_ranks(-_free_bytes(world))())


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
