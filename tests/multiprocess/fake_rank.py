"""One rank of a world of any size, without the other ranks: no message is sent, and floating-point tensors are fake
(`tost_lm.torch_internals.FakeFloats`), also after a collective.

Internals of libraries that this module uses, as of torch 2.13 and DeepSpeed 0.19:

- `torch.testing._internal.distributed.fake_pg`: the process group;
- `torch._C._distributed_c10d`: `FakeWork`;
- the `tensor_memo` of a `FakeTensorMode`'s converter, whose references to parameters keep `torch.nn.Module.to` from
  replacing them;
- `torch.distributed.fsdp._fully_shard`: `alloc_storage` and `free_storage`, which resize memory of gathered weights;
- `torch.utils._pytree`; `_schema` of an operator;
- `_cdata` of a storage, which identifies it;
- `deepspeed.comm.comm.cdb`: DeepSpeed's process group, which must not outlive torch's.
"""

import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from tost_lm.parallel import mesh
from tost_lm.parallel.mesh import World, start_world
from tost_lm.testing.ranks import Traffic
from tost_lm.torch_internals import FakeFloats, FakeTensor, argument_names

_DEVICE = torch.ops.prim.device.default
_READ_NUMBER = torch.ops.aten._local_scalar_dense.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default


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
        self._resizing = ExitStack()
        self._storages: dict[int, tuple[Any, int]] = {}
        self._live = 0
        self.peak = 0
        """Bytes of live tensors at their peak since `restart`."""

    def __enter__(self) -> "FakeRank":
        for module, name in (
            (_fsdp_param, "alloc_storage"),
            (_fsdp_param, "free_storage"),
            (_fsdp_param_group, "alloc_storage"),
        ):
            resize = partial(self._resize, getattr(module, name))
            self._resizing.enter_context(patch.object(module, name, resize))
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._resizing.close()

    def restart(self) -> None:
        """Forget collectives and the peak so far."""
        self.sent = []
        self.peak = self._live

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is _DEVICE:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func is _READ_NUMBER and isinstance(args[0], FakeTensor):
            # A finite norm, counted labels, and no token that is not finite: the step is applied.
            return 1.0 if args[0].is_floating_point() else True
        kwargs = kwargs or {}
        self.record(func, args, kwargs)
        if func.namespace == "c10d":
            work = FakeWork().boxed()
            return work if len(func._schema.returns) == 1 else (args[0], work)
        if func is _WAIT:
            return args[0]
        if func.namespace == "_c10d_functional":
            out = self.faked(func, types, args, kwargs)
        else:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and not x.is_meta and not isinstance(x, DTensor):  # which has its shard's memory
                self._count(x)
        return out

    def faked(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        written = [one.name for one in func._schema.arguments if one.alias_info and one.alias_info.is_write]
        if len(written) == len(func._schema.returns) == 1 and torch.Tag.inplace_view not in func.tags:
            # Only values change. Of long rows, most operations are such.
            return (dict(zip(argument_names(func), args, strict=False)) | kwargs)[written[0]]
        out = super().faked(func, types, args, kwargs)
        self._fake.fake_tensor_converter.meta_converter.tensor_memo.clear()
        return out

    def _count(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        self._storages[key] = weakref.ref(storage, lambda _: self._free(key)), 0
        self._set_size(storage)

    def _resize(self, resize: Callable[[Tensor], None], x: Tensor) -> None:
        resize(x)
        self._count(x)
        self._set_size(x.untyped_storage())

    def _set_size(self, storage: torch.UntypedStorage) -> None:
        reference, before = self._storages[storage._cdata]
        self._storages[storage._cdata] = reference, storage.nbytes()
        self._live += storage.nbytes() - before
        self.peak = max(self.peak, self._live)

    def _free(self, key: int) -> None:
        self._live -= self._storages.pop(key)[1]
