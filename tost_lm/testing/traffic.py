"""A record of the messages that a rank sends, from torch's dispatcher, which sees every collective."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

from tost_lm.torch_internals import TorchDispatchMode, argument_names

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

    This includes the backward on a CPU, which runs in the calling thread. Results that selective activation
    checkpointing has cached are not sent and not counted.
    """

    def __init__(self):
        super().__init__()
        self.sent: list[Sent] = []

    @property
    def bytes(self) -> int:
        """Total size of the messages."""
        return sum(sent.bytes for sent in self.sent)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace in NAMESPACES and name not in SENDING_NOTHING:
            given = dict(zip(argument_names(func), args, strict=False))
            given |= kwargs or {}
            kind = f"c10d.{name}" if func.namespace == "c10d" else name
            self.sent.append(Sent(kind, _group_name(given), sum(x.nbytes for x in _inputs(given))))
        return func(*args, **(kwargs or {}))


def _group_name(given: dict[str, Any]) -> str:
    if "process_group" in given:
        return ProcessGroup.unbox(given["process_group"]).group_name
    group = given["group_name"]
    return group if isinstance(group, str) else group.group_name


def _inputs(given: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The arguments named `input…`, or `tensor(s)` of collectives that work in place."""
    for name, value in given.items():
        if name.startswith("input") or name in ("tensor", "tensors"):
            yield from _tensors(value)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
