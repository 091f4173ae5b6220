"""The process group of this run: NCCL on GPUs, gloo elsewhere, one rank without a launcher."""

import os
import warnings
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from tost_lm.errors import ConfigError

# Names that torch is about to change, in what megatron-core and DeepSpeed call.
warnings.filterwarnings("ignore", message=r".*torch\.distributed\.\w+` is deprecated.*", category=FutureWarning)


class World(NamedTuple):
    """This process among its peers, and the device it computes on."""

    rank: int
    size: int
    device: torch.device


def start_world(device: Literal["auto", "cuda", "mps", "cpu"]) -> World:
    """Join the launcher's process group, or make one of a single rank when there is no launcher.

    Raises:
        ConfigError: the device is not there, or there are more ranks on this node than GPUs.
    """
    kind = _device_kind(device)
    local_rank = int(os.environ.setdefault("LOCAL_RANK", "0"))  # DeepSpeed asks for it, launcher or not
    if kind == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"rank {local_rank} of this node has no GPU (it has {torch.cuda.device_count()}): "
                "launch with --nproc-per-node at most that"
            )
        torch.cuda.set_device(local_rank)
    if not dist.is_initialized():
        backend = "nccl" if kind == "cuda" else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    chosen = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
    return World(dist.get_rank(), dist.get_world_size(), chosen)


def stop_world() -> None:
    """Leave the process group, all ranks together."""
    dist.barrier()
    dist.destroy_process_group()


def is_rank_0() -> bool:
    """Whether this rank is the one that writes and speaks."""
    return dist.get_rank() == 0


def mean_over_ranks(value: torch.Tensor) -> float:
    """The mean of a scalar over all ranks."""
    total = value.detach().cpu().double()
    total = total.cuda() if value.is_cuda else total  # NCCL reduces on GPUs only, gloo on the CPU
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def _device_kind(device: str) -> str:
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if device == "auto":
        return next(kind for kind, available in there.items() if available)
    if not there[device]:
        raise ConfigError(f"run.device = {device}: this machine has none; choose cpu or auto")
    return device
