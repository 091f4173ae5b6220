"""Operators of `torch.library`: a compiled graph calls them, and they run as they do without `torch.compile`.

`torch.compile` cannot trace the token mixers: they loop over chunks and documents, and ranks exchange sums in between.
So each is one operator of the graph and runs the code of eager mode, with the same results bit for bit (except that it
ignores autocast).
What it reads of the batch's documents is no part of the graph, so other documents need no new compilation.

Graphs contain tensors only. A handle, a tensor [1] on the host, stands for a Python object: the documents of a call, or
a forward pass that waits for its backward. The object is freed with the handle's memory, whose address identifies it.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.library import custom_op

from tost_lm.errors import ConfigError
from tost_lm.torch_internals import autograd_as_outside

_OBJECTS: dict[int, Any] = {}


def handle_for(held: Any) -> Tensor:
    """A handle that stands for `held`, which must not refer to its handle: neither would be freed.

    It contains its address, so that a copy stands for `held` as well while the handle exists.
    """
    memory = np.zeros(1, np.int64)
    handle = torch.from_numpy(memory)
    handle.fill_(handle.data_ptr())
    _OBJECTS[handle.data_ptr()] = held
    weakref.finalize(memory, _OBJECTS.pop, handle.data_ptr())
    return handle


def _held_by(handle: Tensor) -> Any:
    return _OBJECTS[int(handle) or handle.data_ptr()]


class Registered:
    """A function as the differentiable operator `torch.ops.tost_lm.NAME`."""

    def __init__(self, name: str, run: Callable[..., Sequence[Tensor]], fake: Callable[..., Sequence[Tensor]]):
        """
        Args:
            run: run(held, tensors, *options), where some tensors may be None. Differentiable by autograd; tensors that
                its backward needs are stored with `save_for_backward` only.
            fake: fake(tensors, *options): uninitialised tensors of the same shapes and dtypes as `run` returns.
        """
        self._run = run
        schema = "(Tensor[] tensors, Tensor? handle, bool[] given, bool[] differentiated, str[] options) -> Tensor[]"
        self.operator = custom_op(f"tost_lm::{name}", self._forward, mutates_args=(), schema=schema)
        self.operator.register_fake(
            lambda tensors, handle, given, differentiated, options: [
                *fake(_placed(tensors, given), *options),
                torch.empty(1, dtype=torch.int64),
            ]
        )
        self.operator.register_autograd(_backward, setup_context=_save)

    def __call__(
        self, held: Any, handle: Tensor | None, tensors: Sequence[Tensor | None], *options: str, **eager: Any
    ) -> Sequence[Tensor]:
        """run(held, tensors, *options, **eager); in a compiled graph `handle` stands for `held`, without `eager`."""
        if not torch.compiler.is_compiling():
            return self._run(held, tensors, *options, **eager)
        if any(x is not None for x in eager.values()):
            raise ConfigError("torch.compile does not support tensor ranks; set parallel.tensor = 1, or do not compile")
        given = [x.contiguous() for x in tensors if x is not None]
        differentiated = [torch.is_grad_enabled() and x.requires_grad for x in given]
        are_given = [x is not None for x in tensors]
        return self.operator(given, handle, are_given, differentiated, list(options))[:-1]

    def _forward(
        self,
        tensors: Sequence[Tensor],
        handle: Tensor | None,
        given: Sequence[bool],
        differentiated: Sequence[bool],
        options: Sequence[str],
    ) -> list[Tensor]:
        """The results, then the handle of their backward."""
        held = None if handle is None else _held_by(handle)
        if not any(differentiated):
            results = self._run(held, _placed(tensors, given), *options)
            return [*_separate(results, tensors), torch.zeros(1, dtype=torch.int64)]
        waiting = _Pass()
        with waiting.recorded():
            leaves = [x.detach().requires_grad_(needed) for x, needed in zip(tensors, differentiated, strict=True)]
            results = self._run(held, _placed(leaves, given), *options)
        returned = _separate(results, tensors)
        waiting.finish(leaves, results, [*tensors, *returned])
        return [*returned, handle_for(waiting).zero_()]  # equal inputs have equal results


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, _, _, ctx.differentiated, _ = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Any, ...]:
    *in_graph, handle = ctx.saved_tensors
    gradients = gradients[:-1]  # the last result is the handle; zeros for it would need a C++ compiler
    given = [d is not None for d in gradients]
    differentiated = [*ctx.differentiated, *(False for _ in given)]
    found = iter(
        torch.ops.tost_lm.backward(handle, [d for d in gradients if d is not None], given, in_graph, differentiated)
    )
    return [next(found) if needed else None for needed in ctx.differentiated], None, None, None, None


class _Pass:
    """A forward pass that waits for its backward.

    It reads no memory of the graph's tensors, which the graph may use for other tensors: the backward is given them.
    """

    def __init__(self) -> None:
        self._saved: list[_Saved] = []
        self._in_graph: Sequence[Tensor] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Autograd records operations for this pass."""
        saved_tensors, this = self._saved, weakref.ref(self)  # hooks that held the pass would keep it forever

        def pack(x: Tensor) -> _Saved:
            saved_tensors.append(_Saved(x.detach()))
            return saved_tensors[-1]

        def unpack(saved: _Saved) -> Tensor:
            waiting = this()
            assert waiting is not None
            return saved.restored(waiting._in_graph)

        with autograd_as_outside(), saved_tensors_hooks(pack, unpack):
            yield

    def finish(self, inputs: Sequence[Tensor], results: Sequence[Tensor], in_graph: Sequence[Tensor]) -> None:
        with autograd_as_outside():
            self._inputs = [get_gradient_edge(x) for x in inputs if x.requires_grad]
            self._results = [get_gradient_edge(x) if x.requires_grad else None for x in results]
        for saved in self._saved:
            saved.release(in_graph)
        del self._saved

    def backward(self, gradients: Sequence[Tensor | None], in_graph: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """The gradients of the inputs that need one; None is zero."""
        self._in_graph = in_graph
        pairs = zip(self._results, gradients, strict=True)
        used = [(result, d) for result, d in pairs if result is not None and d is not None]
        with autograd_as_outside():
            found = torch.autograd.grad(
                [result for result, _ in used], self._inputs, [d for _, d in used], allow_unused=True
            )
        self._in_graph = []
        return found


class _Saved:
    """A tensor that a pass has saved for its backward."""

    def __init__(self, x: Tensor):
        self._x: Tensor | None = x

    def release(self, in_graph: Sequence[Tensor]) -> None:
        """If it is a view of one of these contiguous tensors, keep only which."""
        x = self._x
        assert x is not None
        for index, whole in enumerate(in_graph):
            offset = x.storage_offset() - whole.storage_offset()
            if _address(x) == _address(whole) and 0 <= offset < whole.numel():
                self._x, self._view = None, (index, x.shape, x.stride(), offset)
                return

    def restored(self, in_graph: Sequence[Tensor]) -> Tensor:
        if self._x is not None:
            return self._x
        index, shape, stride, offset = self._view
        whole = in_graph[index].contiguous()
        return whole.as_strided(shape, stride, whole.storage_offset() + offset)


@custom_op(
    "tost_lm::backward",
    mutates_args=(),
    schema="(Tensor handle, Tensor[] gradients, bool[] given, Tensor[] in_graph, bool[] differentiated) -> Tensor[]",
)
def _backward_of_pass(
    handle: Tensor,
    gradients: Sequence[Tensor],
    given: Sequence[bool],
    in_graph: Sequence[Tensor],
    differentiated: Sequence[bool],
) -> list[Tensor]:
    """The gradients of those of the pass's inputs and results, `in_graph`, that are `differentiated`."""
    found = _held_by(handle).backward(_placed(gradients, given), in_graph)
    inputs = [x for x, needed in zip(in_graph, differentiated, strict=True) if needed]
    found = [torch.zeros_like(x) if d is None else d for x, d in zip(inputs, found, strict=True)]
    return _separate(found, [*gradients, *in_graph])


@_backward_of_pass.register_fake
def _fake_backward(
    handle: Tensor, gradients: Sequence[Tensor], given: Sequence[bool], in_graph: Sequence[Tensor],
    differentiated: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    return [x.new_empty(x.shape) for x, needed in zip(in_graph, differentiated, strict=True) if needed]


def _placed(tensors: Iterable[Tensor], given: Sequence[bool]) -> list[Tensor | None]:
    """With None where no tensor was given."""
    left = iter(tensors)
    return [next(left) if is_given else None for is_given in given]


def _separate(results: Iterable[Tensor], inputs: Iterable[Tensor]) -> list[Tensor]:
    """Contiguous, each in its own memory and not in that of `inputs`: operators must return such tensors."""
    taken = {_address(x) for x in inputs}
    separate = []
    for result in results:
        x = result.detach().contiguous()
        separate.append(x.clone() if _address(x) in taken else x)
        taken.add(_address(separate[-1]))
    return separate


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
