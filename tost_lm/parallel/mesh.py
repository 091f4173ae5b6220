"""The process group of a run (NCCL on GPUs, gloo elsewhere; one rank without a launcher); the device mesh of tensor,
sequence and data axes; and the model's collectives, each over an explicit axis.

They are torch's functional collectives: asynchronous operators of the dispatcher. So tests can count them, and
selective activation checkpointing keeps their results. (Recomputation does repeat megatron-core's own collectives.)
"""

import os
import secrets
import socket
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (
    HashStore,  # pyright: ignore[reportPrivateImportUsage]
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.distributed.rendezvous import rendezvous
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from tost_lm.errors import ConfigError, TostError
from tost_lm.parallel.agreement import all_gather_object, communication_device, rank_numbers
from tost_lm.parallel.settings import ParallelConfig
from tost_lm.parallel.timeouts import Timeouts
from tost_lm.torch_internals import FUNCTIONAL_COLLECTIVES

OF_LIBRARIES = (
    r".*torch\.distributed\.\w+` is deprecated", ".*Apex are not installed", ".*CUDA_DEVICE_MAX_CONNECTIONS",
    "FSDP2-wrapped module .* returned a view tensor",  # which nothing changes in place
)  # fmt: skip
"""Warnings of megatron-core, DeepSpeed and `fully_shard` that need no action."""


class World(NamedTuple):
    """Rank and device of this process, and the world size."""

    rank: int
    size: int
    device: torch.device
    timeout: timedelta
    """Limit of collectives in all process groups."""


def start_world(device: Literal["auto", "cuda", "cpu"], timeouts: Timeouts | None = None) -> World:
    """Join the launcher's process group, or create one with a single rank if there is no launcher.

    Args:
        timeouts: of the rendezvous and of collectives.

    Raises:
        ConfigError: this node has no GPU for this rank.
        TostError: the rendezvous timed out.
    """
    for message in OF_LIBRARIES:
        warnings.filterwarnings("ignore", message)
    kind = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    prefer_loopback()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    chosen = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
    timeouts = timeouts or Timeouts()
    timeout = timedelta(seconds=timeouts.collective)
    if kind == "cuda":
        if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name of the variable, which the user may have set
            os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"no GPU for local rank {local_rank}: this node has {torch.cuda.device_count()} GPUs; "
                "start at most one rank per GPU, or choose the device cpu"
            )
        torch.cuda.set_device(chosen)
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


def prefer_loopback() -> None:
    """Ranks that are all on one node listen on its loopback interface, unless the user has chosen one: gloo and NCCL
    trust whoever connects."""
    if os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1"):
        name = "lo" if sys.platform == "linux" else "lo0"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # NCCL treats a bare name as a prefix


def stop_world() -> None:
    """Destroy the process group after a barrier."""
    dist.barrier()
    dist.destroy_process_group()


def max_over_ranks(number: int) -> Callable[[], int]:
    """Start to compute the maximum over all ranks, on a GPU after what is in its queue. The returned function waits."""
    device = communication_device()
    largest = torch.full((), number, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    if device.type == "cpu":
        return lambda: int(largest)
    here = torch.empty_like(largest, device="cpu", pin_memory=True)
    here.copy_(largest, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> int:
        copied.synchronize()  # int(largest) would also wait for what was queued since
        return int(here)

    return read


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
    """Ranks with different sequences. It has no process group: they communicate as replicas."""
    replicas: Axis
    """data × sequence: ranks with the same weights. Gradients are averaged over them."""
    shards: Axis
    """Adjacent replicas that hold one copy of what ZeRO partitions, `parallel.shard_ranks` or all of them."""
    copies: Axis
    """Replicas with the same shard."""
    device: torch.device
    node: Axis
    """Ranks on the same host."""

    @property
    def rank(self) -> int:
        """In the world."""
        return self.replicas.rank * self.tensor.size + self.tensor.rank


def build_mesh(world: World, parallel: ParallelConfig) -> Mesh:
    """The axes of this rank; the process group must be initialized, and all ranks call it together.

    A rank creates only the groups that it is in and communicates over. That of sequence ranks is not the one of
    replicas even if both cover all ranks: on a GPU, exchanges would wait for the gradients that overlap the backward.

    Raises:
        ConfigError: tensor × sequence does not divide the world size.
    """
    data, copy = parallel.data_ranks(world.size), parallel.tensor * parallel.sequence
    tensor = sequence = Axis(0, 1, None)
    t, d = world.rank % parallel.tensor, world.rank // copy
    replicas = node = Axis(world.rank, world.size, dist.group.WORLD)
    if parallel.tensor > 1:
        tensor = _axis("tensor", range(world.rank - t, world.rank - t + parallel.tensor), world)
        replicas = _axis("replicas", range(t, world.size, parallel.tensor), world)
    if parallel.sequence > 1:
        sequence = _axis("sequence", range(d * copy + t, (d + 1) * copy, parallel.tensor), world)
    shards, copies, size = replicas, Axis(0, 1, None), parallel.shards(replicas.size)
    if size < replicas.size:
        ranks, first = range(t, world.size, parallel.tensor), replicas.rank // size * size
        shards = _axis("shards", ranks[first : first + size], world)
        copies = _axis("copies", ranks[replicas.rank % size :: size], world)
    hosts = all_gather_object(socket.gethostname())
    if len(ranks := [rank for rank, host in enumerate(hosts) if host == hosts[world.rank]]) < world.size:
        node = _axis("node", ranks, world)
    return Mesh(tensor, sequence, Axis(d, data, None), replicas, shards, copies, world.device, node)


def _axis(name: str, ranks: Sequence[int], world: World) -> Axis:
    """Each rank calls it with the ranks of its own group. The groups have no rank in common and together hold all,
    which NCCL needs: it splits the communicator of all ranks."""
    group = dist.new_group(ranks, world.timeout, use_local_synchronization=True, group_desc=name)
    return Axis(ranks.index(world.rank), len(ranks), group)


Pending = Callable[[], Tensor]
around_waits: ContextVar[Callable[[], AbstractContextManager[None]]] = ContextVar("around_waits", default=nullcontext)
"""Entered around each wait of a collective below: of the host, or of the GPU's queue. Those of a graph are not seen."""


def all_gather(x: Tensor, axis: Axis) -> Pending:
    """Start gathering x, equally shaped on all R ranks. The returned function waits for the result [R, …]."""
    gathered = FUNCTIONAL_COLLECTIVES.all_gather_into_tensor(x.contiguous(), axis.size, axis.group.group_name)
    return lambda: _wait(gathered).view(axis.size, *x.shape)


def _wait(x: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return FUNCTIONAL_COLLECTIVES.wait_tensor(x)
    with around_waits.get()():
        return FUNCTIONAL_COLLECTIVES.wait_tensor(x)


def all_to_all(x: Tensor, sent: Sequence[int], received: Sequence[int], axis: Axis) -> Tensor:
    """sent[r] of the rows of x [sum(sent), …] go to rank r, received[r] come from it: [sum(received), …], by rank."""
    exchanged = FUNCTIONAL_COLLECTIVES.all_to_all_single(x.contiguous(), [*received], [*sent], axis.group.group_name)
    return _wait(exchanged)


def reduce_scatter(x_R: Tensor, axis: Axis) -> Tensor:
    """The sum over ranks of row r of x_R [R, …], on rank r: […]."""
    scattered = FUNCTIONAL_COLLECTIVES.reduce_scatter_tensor(
        x_R.flatten(0, 1).contiguous(), "sum", axis.size, axis.group.group_name
    )
    return _wait(scattered).view(x_R.shape[1:])


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """The sum over ranks. A single rank communicates nothing, so any device works."""
    if axis.size == 1:
        return x
    return _wait(FUNCTIONAL_COLLECTIVES.all_reduce(x.contiguous(), "sum", axis.group.group_name))


def broadcast(x: Tensor, source: int, axis: Axis) -> None:
    """Overwrite x with that of rank `source`, in place, so not as a functional collective."""
    if axis.size > 1 and x.numel():
        dist.broadcast(x, group=axis.group, group_src=source)


def _keep(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    is_collective = operator.namespace == FUNCTIONAL_COLLECTIVES.name
    return CheckpointPolicy.MUST_SAVE if is_collective else CheckpointPolicy.PREFER_RECOMPUTE


keep_received = partial(create_selective_checkpoint_contexts, _keep)
"""`context_fn` of `torch.utils.checkpoint.checkpoint(…, use_reentrant=False)`: results of collectives are kept."""
