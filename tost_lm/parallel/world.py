"""The process group of a run: NCCL on GPUs, gloo elsewhere; one rank without a launcher."""

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
from tost_lm.parallel import Timeouts
from tost_lm.parallel.agreement import communication_device, rank_numbers

# megatron-core and DeepSpeed call deprecated names.
warnings.filterwarnings("ignore", message=r".*torch\.distributed\.\w+` is deprecated.*", category=FutureWarning)


class World(NamedTuple):
    """Rank and device of this process, and the world size."""

    rank: int
    size: int
    device: torch.device
    timeout: timedelta
    """Of collectives in all process groups."""


def start_world(device: Literal["auto", "cuda", "mps", "cpu"], timeouts: Timeouts | None = None) -> World:
    """Join the launcher's process group, or create one with a single rank if there is no launcher.

    Args:
        timeouts: of the rendezvous and of collectives.

    Raises:
        ConfigError: the device does not exist, or this node has more ranks than GPUs.
        TostError: the rendezvous timed out.
    """
    kind = _device_kind(device)
    local_rank = int(os.environ.setdefault("LOCAL_RANK", "0"))  # DeepSpeed needs it without a launcher, too
    chosen = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
    timeouts = timeouts or Timeouts()
    timeout = timedelta(seconds=timeouts.collective)
    if kind == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"no GPU for local rank {local_rank}: this node has {torch.cuda.device_count()} GPUs; "
                "start at most one rank per GPU"
            )
        torch.cuda.set_device(chosen)
        # Loader workers are forked later. Without this, a page that InfiniBand writes to may end up in a worker.
        os.environ.setdefault("RDMAV_FORK_SAFE", "1")
    if not dist.is_initialized():
        store, rank, size = HashStore(), 0, 1
        if "RANK" in os.environ:
            launcher, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeouts.start)))
            store = _attempt_store(launcher, rank, size, timeouts.start)
        dist.init_process_group(
            "nccl" if kind == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=chosen if kind == "cuda" else None,
        )
    return World(dist.get_rank(), dist.get_world_size(), chosen, timeout)


def stop_world() -> None:
    """Destroy the process group after a barrier."""
    dist.barrier()
    dist.destroy_process_group()


def max_over_ranks(number: int) -> int:
    """The maximum over all ranks."""
    largest = torch.tensor(number, device=communication_device())
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def _attempt_store(store: Store, rank: int, size: int, timeout_s: float) -> Store:
    """A prefix of the launcher's store for the processes of this attempt only. Returns once all of them have joined.

    torchrun keeps its store over restarts, with gloo's addresses of dead ranks, and new ranks would connect to those.
    The restart count cannot identify an attempt, since nodes may count differently. So each process publishes a random
    token, and rank 0 answers the token with the prefix.
    """
    if rank == 0:
        return _attempt_store_of_rank_0(store, size, timeout_s)
    token = secrets.token_hex(8)
    store.set(f"tost_lm/token/{rank}", token)
    try:
        attempt = PrefixStore(store.get(f"tost_lm/prefix/{token}").decode(), store)
        attempt.set(f"joined/{rank}", "")
        attempt.get("all joined")
    except dist.DistError:
        raise TostError(f"rank {rank}: rendezvous with the other ranks timed out after {timeout_s:.0f} s") from None
    return attempt


def _attempt_store_of_rank_0(store: Store, size: int, timeout_s: float) -> Store:
    prefix = f"tost_lm/attempt/{secrets.token_hex(8)}"
    attempt, missing, deadline = PrefixStore(prefix, store), list(range(1, size)), time.monotonic() + timeout_s
    while missing:
        for rank in missing:
            if store.check([f"tost_lm/token/{rank}"]):  # perhaps of a dead process; a new one replaces it
                store.set(f"tost_lm/prefix/{store.get(f'tost_lm/token/{rank}').decode()}", prefix)
        missing = [rank for rank in missing if not attempt.check([f"joined/{rank}"])]
        if missing and time.monotonic() > deadline:
            raise TostError(f"ranks {rank_numbers(missing)} did not join within {timeout_s:.0f} s")
        time.sleep(0.02)
    attempt.set("all joined", "")
    return attempt


def _device_kind(device: str) -> str:
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if device == "auto":
        return next(kind for kind, is_available in available.items() if is_available)
    if not available[device]:
        raise ConfigError(f"run.device = {device}: this machine has no such device; choose cpu or auto")
    return device
