"""One rank of a world of any size, without the other ranks: no message is sent, and floating-point tensors are fake
(`tost_lm.torch_internals.FakeFloats`), also after a collective.

Internals of libraries that this module uses, as of torch 2.13 and DeepSpeed 0.19:

- `torch.testing._internal.distributed.fake_pg`: the process group;
- `torch._C._distributed_c10d`: `FakeWork`;
- the `tensor_memo` of a `FakeTensorMode`'s converter, whose references to parameters keep `torch.nn.Module.to` from
  replacing them;
- `torch.utils.swap_tensors`, by which `torch.nn.Module.to` replaces a fake parameter; DeepSpeed refers to parameters;
- `torch.utils._pytree`; `_schema` of an operator;
- `_cdata` of a storage, which identifies it; `sys._getframe`, which finds the package that allocates;
- `deepspeed.comm.comm.cdb`: DeepSpeed's process group, which must not outlive torch's.
"""

import os
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from tost_lm.parallel import mesh
from tost_lm.parallel.mesh import World, start_world
from tost_lm.testing.ranks import Traffic
from tost_lm.torch_internals import FakeFloats

Kind = Literal["weights", "optimizer", "gradients", "activations", "buffers"]
"""Use of memory. Activations are all that the model's forward and backward allocate, the loss included; buffers are
what DeepSpeed allocates."""

_DEVICE = torch.ops.prim.device.default
_KIND_OF_PACKAGE: dict[str, Kind] = {"tost_lm": "activations", "megatron": "activations", "deepspeed": "buffers"}


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[World]:
    """The process group of a rank of one host in which collectives send nothing. There must be none yet; it is
    destroyed after."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with warnings.catch_warnings(), patch.object(mesh, "all_gather_object", lambda _: ["one"] * size):
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield start_world("cpu")
    finally:
        if deepspeed := sys.modules.get("deepspeed.comm.comm"):
            deepspeed.cdb = None  # pyright: ignore[reportAttributeAccessIssue]
        dist.destroy_process_group()


class FakeRank(FakeFloats, Traffic):
    """Inside `with FakeRank() as rank:`, floating-point tensors are fake. `rank.sent` collects the collectives."""

    def __init__(self) -> None:
        super().__init__()
        self._swap = patch.object(torch.utils, "swap_tensors", _replace_data)
        self._storages: dict[int, tuple[Any, int, Kind]] = {}
        self._live: Counter[Kind] = Counter()
        self.peak: Counter[Kind] = Counter()
        """Bytes of live tensors at their peak since `restart`, by use."""

    def __enter__(self) -> "FakeRank":
        self._swap.start()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._swap.stop()

    def restart(self) -> None:
        """Forget collectives and the peak so far."""
        self.sent = []
        self.peak = self._live.copy()

    def label(self, kind: Kind, tensors: Iterable[Tensor]) -> None:
        """The use of the memory of these tensors."""
        for x in tensors:
            if found := self._storages.get(x.untyped_storage()._cdata):
                reference, size, before = found
                self._storages[x.untyped_storage()._cdata] = reference, size, kind
                self._live[before] -= size
                self._live[kind] += size

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is _DEVICE:
            return super().__torch_dispatch__(func, types, args, kwargs)
        kwargs = kwargs or {}
        self.record(func, args, kwargs)
        if func.namespace == "c10d":
            work = FakeWork().boxed()
            return work if len(func._schema.returns) == 1 else (args[0], work)
        if func.namespace == "_c10d_functional":
            out = self.faked(func, types, args, kwargs)
        else:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and not x.is_meta:
                self._count(x)
        return out

    def faked(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        out = super().faked(func, types, args, kwargs)
        self._fake.fake_tensor_converter.meta_converter.tensor_memo.clear()
        return out

    def _count(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        kind, size = _allocator(), storage.nbytes()
        self._storages[key] = weakref.ref(storage, lambda _: self._free(key)), size, kind
        self._live[kind] += size
        if self._live.total() > self.peak.total():
            self.peak = self._live.copy()

    def _free(self, key: int) -> None:
        _, size, kind = self._storages.pop(key)
        self._live[kind] -= size


def _allocator() -> Kind:
    """By the innermost package on the stack that allocates. Autograd's operations have the stack of its caller."""
    frame = sys._getframe()
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module == "torch.autograd.graph":
            break
        if module != __name__ and (kind := _KIND_OF_PACKAGE.get(module.partition(".")[0])):
            return kind
        frame = frame.f_back
    return "activations"


def _replace_data(x: Tensor, y: Tensor) -> None:
    x.data = y.data
