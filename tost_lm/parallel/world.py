"""The process group of this run: NCCL on GPUs, gloo elsewhere, one rank without a launcher."""

import os
import secrets
import time
import warnings
from datetime import timedelta
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import (
    HashStore,  # pyright: ignore[reportPrivateImportUsage]
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.distributed.rendezvous import rendezvous

from tost_lm.errors import ConfigError, TostError
from tost_lm.parallel.agreement import rank_numbers, wire_device

# Names that torch is about to change, in what megatron-core and DeepSpeed call.
warnings.filterwarnings("ignore", message=r".*torch\.distributed\.\w+` is deprecated.*", category=FutureWarning)


MEETING_S = 600.0  # what the ranks of a launch may come after each other; they import for minutes on a slow disk
LATER_S = 5.0  # parallel.failures names who hangs after timeout_seconds; NCCL aborts the process at its own limit


class World(NamedTuple):
    """This process among its peers, and the device it computes on."""

    rank: int
    size: int
    device: torch.device


def start_world(device: Literal["auto", "cuda", "mps", "cpu"], timeout_seconds: float = 600.0) -> World:
    """Join the launcher's process group, or make one of a single rank when there is no launcher.

    Args:
        timeout_seconds: what a rank may keep the others waiting in `naming_lost_ranks`; a collective itself gives up
            5 s later. The ranks may come up to 10 minutes after each other, whatever it is.

    Raises:
        ConfigError: the device is not there, or there are more ranks on this node than GPUs.
        TostError: ranks did not come.
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
            store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=MEETING_S)))
            limit = timedelta(seconds=timeout_seconds + LATER_S)
            dist.init_process_group(
                backend, store=_store_of_this_attempt(store, rank, size), rank=rank, world_size=size, timeout=limit
            )
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


def max_over_ranks(number: int) -> int:
    """The largest of all ranks' numbers."""
    largest = torch.tensor(number, device=wire_device())
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def _store_of_this_attempt(store: Store, rank: int, size: int) -> Store:
    """A part of the launcher's store that only the processes of now know of; all of them have come when it is there.

    torchrun keeps its store when it starts the ranks again, and with it the addresses at which gloo met the dead ones:
    a quick rank would connect to those. How often torchrun has restarted them is no name for an attempt, since nodes
    can count differently. So each process leaves a word of its own, and rank 0 answers to that word.
    """
    if rank == 0:
        return _answered_by_all(store, size)
    word = secrets.token_hex(8)
    store.set(f"tost_lm/word/{rank}", word)
    try:
        ours = PrefixStore(store.get(f"tost_lm/answer/{word}").decode(), store)
        ours.set(f"heard/{rank}", "")
        ours.get("all are here")
    except dist.DistError:
        raise TostError(f"rank 0 and rank {rank} did not meet all others within {MEETING_S:.0f} s") from None
    return ours


def _answered_by_all(store: Store, size: int) -> Store:
    attempt = f"tost_lm/attempt/{secrets.token_hex(8)}"
    ours, missing, deadline = PrefixStore(attempt, store), list(range(1, size)), time.monotonic() + MEETING_S
    while missing:
        for rank in missing:
            if store.check([f"tost_lm/word/{rank}"]):  # it may be a dead process's, and a new one may come later
                store.set(f"tost_lm/answer/{store.get(f'tost_lm/word/{rank}').decode()}", attempt)
        missing = [rank for rank in missing if not ours.check([f"heard/{rank}"])]
        if missing and time.monotonic() > deadline:
            raise TostError(f"ranks {rank_numbers(missing)} did not come within {MEETING_S:.0f} s")
        time.sleep(0.02)
    ours.set("all are here", "")
    return ours


def _device_kind(device: str) -> str:
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if device == "auto":
        return next(kind for kind, available in there.items() if available)
    if not there[device]:
        raise ConfigError(f"run.device = {device}: this machine has none; choose cpu or auto")
    return device
