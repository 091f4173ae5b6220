"""Inductor's code for a Hopper GPU, generated without one: the kernels of a compiled function, and their bytes.

The graphs are traced on tensors of the CPU and lowered as if these were on a GPU. Nothing is compiled further or run.
torch has no public way: the names patched here are private, those of torch 2.13.
"""

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

HOPPER = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, regs_per_multiprocessor=65536, warp_size=32,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, total_memory=141 << 30,
)  # fmt: skip
GPU = torch.device("cuda:0")


class Kernels(NamedTuple):
    """The calls in the code of a pass."""

    calls: list[str]
    """Kernels that Inductor generated, by the number of their graph and their name, in order."""
    bytes_of: dict[str, int]
    """What each of them reads and writes in a call, by Inductor's own count."""
    products: int

    @property
    def generated(self) -> int:
        return len(self.calls)

    @property
    def bytes(self) -> int:
        return sum(self.bytes_of[name] for name in self.calls)


COUNTS = ("generated", "products")


class _GeneratedError(Exception):
    """The code is complete."""


def kernels_of(call: Callable[[], object]) -> list[Kernels]:
    """The kernels of the forwards, and those of the backwards, of the graphs that `call` compiles, as `compile_blocks`
    compiles them. The call has tensors of the CPU."""
    from torch._inductor import compile_fx

    torch.compiler.reset()  # else a graph of an earlier call may serve
    codes: tuple[list[str], list[str]] = [], []
    generate = partial(_generate, codes, compile_fx.compile_fx_inner)
    with _hopper(), patch.object(compile_fx, "compile_fx_inner", generate):
        call()
    return [_kernels(of_pass) for of_pass in codes]


def _kernels(codes: Sequence[str]) -> Kernels:
    kernels = Kernels([], {}, 0)
    for graph, code in enumerate(codes):
        found = re.findall(r"'kernel_name': '(\w+)'.*?'kernel_num_gb': ([\d.e+-]+)", code)
        body = code[code.index("\n    def call(") : code.index("\nrunner = ")]
        calls = re.findall(r"^\s+(triton_\w+)\.run\(", body, re.MULTILINE)
        kernels = Kernels(
            [*kernels.calls, *(f"{graph}: {name}" for name in calls)],
            kernels.bytes_of | {f"{graph}: {name}": round(float(gigabytes) * 1e9) for name, gigabytes in found},
            kernels.products + len(re.findall(r"extern_kernels\.\w+\(", body)),
        )
    return kernels


def _generate(
    codes: tuple[list[str], list[str]], compile_inner: Callable[..., Any], graph: Any, inputs: Any, **options: Any
) -> Any:
    """In place of Inductor's compilation of a graph, which PyTorch's own kernels run."""
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._guards import TracingContext, tracing
    from torch._inductor.exc import InductorError
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    on_cpu = make_boxed_func(graph.forward)
    graph, mode, codegen = copy.deepcopy(graph), FakeTensorMode(allow_non_fake_inputs=True), GraphLowering.codegen

    def on_gpu(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dtype == torch.int64:  # offsets stay on the host
            return x
        with mode:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=GPU)

    def keep(lowering: Any) -> Any:
        codes[bool(options.get("is_backward"))].append(codegen(lowering)[0].value)
        raise _GeneratedError

    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": GPU}
    inputs = [on_gpu(x) for x in inputs]
    FakeTensorProp(graph, mode=mode).propagate_dont_convert_inputs(*inputs)
    with tracing(TracingContext(mode)), V.set_fake_mode(mode), patch.object(GraphLowering, "codegen", keep):
        try:
            compile_inner(graph, inputs, **options)
        except InductorError as error:
            if not isinstance(error.inner_exception, _GeneratedError):
                raise
    return on_cpu


@contextmanager
def _hopper() -> Iterator[None]:
    """torch and Triton find a GPU, but do not use it."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._dynamo.variables import ConstantVariable, TensorVariable
    from torch._functorch import config as functorch
    from torch._inductor import compile_fx, config, scheduler
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    always = lambda value: lambda *_, **__: value
    properties, target = always(HOPPER), SimpleNamespace(get_current_target=always(GPUTarget("cuda", 90, 32)))
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(patch.object(CudaInterface, "get_device_properties", staticmethod(properties)))
        enter(patch.object(torch.cuda, "get_device_properties", properties))
        enter(patch.object(compile_fx, "_check_triton_bf16_support", always(None)))
        enter(patch.object(scheduler, "has_triton", always(True)))
        enter(patch.object(driver, "_active", target))
        enter(patch.object(TensorVariable, "method_attr_is_cuda", lambda *_: ConstantVariable.create(True)))
        enter(functorch.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False))
        enter(config.patch(fx_graph_cache=False, benchmark_kernel=True, compile_threads=1))
        yield
