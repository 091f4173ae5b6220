"""Run a function on several gloo ranks, forked from a server that has imported torch, DeepSpeed and megatron-core; and
a record of the messages that a rank sends, from torch's dispatcher, which sees every collective.
"""

import multiprocessing
import multiprocessing.connection
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from tost_lm.torch_internals import TorchDispatchMode, argument_names, pytree

GRACE_S = 10.0
"""Time to exit that other ranks have after one failed."""
# tost_lm.parallel.mesh silences the warnings of megatron-core's import.
PRELOADED = ["torch", "deepspeed", "tost_lm.parallel.mesh", "megatron.core.tensor_parallel"]


def run_on_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120) -> list[Any]:
    """Call `fn(*args)` on `world_size` processes of one gloo process group.

    `fn` and `args` must be picklable (a function at a module's top level). The store of the group is a file, not a
    port. Each rank has one thread.

    Returns:
        The results in the order of the ranks.

    Raises:
        RuntimeError: a rank failed, with its traceback in the message, or did not finish within `timeout_s`.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed chooses its device once, when the server imports it
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory(prefix="tost_lm_ranks_") as folder:
        ranks = [
            context.Process(target=_rank_main, args=(fn, rank, world_size, folder, args)) for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            return _collect(ranks, Path(folder), timeout_s)
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _rank_main(fn: Callable[..., Any], rank: int, world_size: int, folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    # DeepSpeed reads it. RANK and WORLD_SIZE would imply a launcher's store.
    os.environ["LOCAL_RANK"] = str(rank)
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
        outcome = (True, fn(*args))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        outcome = (False, traceback.format_exc())
    aside = Path(folder, f"{rank}.tmp")
    aside.write_bytes(pickle.dumps(outcome))
    aside.rename(Path(folder, f"{rank}.result"))
    if not outcome[0]:
        os._exit(1)  # other ranks may wait for this one: exit without a collective


def _collect(ranks: list[Any], folder: Path, timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
        if any(process.exitcode for process in ranks):
            deadline = min(deadline, time.monotonic() + GRACE_S)
            if all(_is_stopped(process) for process in ranks if process.is_alive()):
                break
        multiprocessing.connection.wait([process.sentinel for process in ranks if process.is_alive()], timeout=0.5)
    outcomes = [_outcome(rank, process, folder, timeout_s) for rank, process in enumerate(ranks)]
    # A rank that died comes first: it is the cause of the other tracebacks.
    failures = sorted((report for ok, report in outcomes if not ok), key=lambda report: "died" not in report[:20])
    if failures:
        raise RuntimeError("\n".join(failures))
    return [result for _, result in outcomes]


def _is_stopped(process: Any) -> bool:
    """By SIGSTOP, so that it will not exit (Linux)."""
    try:
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].startswith("T")
    except OSError:
        return False


def _outcome(rank: int, process: Any, folder: Path, timeout_s: float) -> tuple[bool, Any]:
    path = folder / f"{rank}.result"
    if path.exists():
        ok, result = pickle.loads(path.read_bytes())
        return ok, result if ok else f"rank {rank} failed:\n{result}"
    if process.is_alive():
        return False, f"rank {rank} is still running after at most {timeout_s} s"
    return False, f"rank {rank} died with exit code {process.exitcode}"


NAMESPACES = ("_c10d_functional", "c10d")
SENDING_NOTHING = {"wait_tensor", "check_for_nan", "irecv", "recv_", "recv_any_source_"}
"""Operators of these namespaces that are not collectives or only receive."""


class Sent(NamedTuple):
    """One message: a collective or a point-to-point send of this rank."""

    kind: str
    """The operator: all_gather_into_tensor, reduce_scatter_tensor, … of torch's functional collectives, or
    c10d.allreduce_, c10d._allgather_base_, … of torch.distributed."""
    group: str
    """Name of the process group, `group.group_name`."""
    bytes: int
    """Size of the tensors that this rank passes to the collective, for any number of receivers."""


class Traffic(TorchDispatchMode):
    """Inside `with Traffic() as traffic:`, `traffic.sent` collects every collective that this thread starts.

    This includes the backward on a CPU, which runs in the calling thread, and graphs of torch.compile. Results that
    selective activation checkpointing has cached are not sent and not counted.
    """

    def __init__(self):
        super().__init__()
        self.sent: list[Sent] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @property
    def bytes(self) -> int:
        """Total size of the messages."""
        return sum(sent.bytes for sent in self.sent)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.record(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def record(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Append to `sent` if the operator is a collective."""
        name = func.overloadpacket.__name__
        if func.namespace not in NAMESPACES or name in SENDING_NOTHING:
            return
        given = dict(zip(argument_names(func), args, strict=False)) | kwargs
        kind = f"c10d.{name}" if func.namespace == "c10d" else name
        self.sent.append(Sent(kind, _group_name(given), sum(x.nbytes for x in _inputs(given))))


def _group_name(given: dict[str, Any]) -> str:
    if "process_group" in given:
        return ProcessGroup.unbox(given["process_group"]).group_name
    group = given["group_name"]
    return group if isinstance(group, str) else group.group_name


def _inputs(given: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments named `input…`, or `tensor(s)` of collectives that work in place."""
    values = [value for name, value in given.items() if name.startswith("input") or name in ("tensor", "tensors")]
    return [x for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor)]
