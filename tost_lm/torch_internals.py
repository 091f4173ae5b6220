"""The only uses of torch's private names, of which a new version may change any:

    torch._C._distributed_c10d, distributed_c10d._get_default_store, ._world    store and flight record of the ranks
    torch.ops._c10d_functional                                                  collectives that graphs may contain
    torch.ops.aten._flash_attention_forward, ._flash_attention_backward         flash attention of packed documents
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    ._scaled_dot_product_flash_attention_for_cpu_backward                       attention to keys in parts
    torch._dynamo.config, torch._inductor, torch.utils._triton  limits and compilers of torch.compile
    torch.utils._pytree, torch.utils._python_dispatch, OpOverload._schema       tests of conformance and of traffic
    torch._foreach_copy_, ._foreach_add_                                        operations on many tensors at once
    torch._subclasses.fake_tensor, torch.ops.aten._local_scalar_dense           plugins, counted without values

`tests/full/test_newest_versions.py` runs the tests of these, and of DeepSpeed's in `parallel/deepspeed.py`, with the
newest versions.
"""

import faulthandler
import os
import pickle
import stat
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, _foreach_add_, _foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FakeTensor", "TorchDispatchMode", "add_each", "copy_each", "pytree"]
add_each, copy_each = _foreach_add_, _foreach_copy_
GLOO_ERRORS = ("gloo/transport/", "Application timeout caused pair closure")  # NCCL and the store raise DistError
RECORDS = 2000
FlashOffsets = tuple[Tensor, Tensor, int, int]
"""Offsets of documents in queries and in keys, int32 [N + 1] on the device, and the tokens of the longest in each."""
FUNCTIONAL_COLLECTIVES = torch.ops._c10d_functional
_READ_NUMBER, _DEVICE = torch.ops.aten._local_scalar_dense.default, torch.ops.prim.device.default
_PREFIX = "TORCH_FR_DUMP_TEMP_FILE"  # torch's variable: NCCL writes here too if it ends a process first


def new_store_connection() -> Any:
    """Another connection to the store of the default process group."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store().clone()  # pyright: ignore[reportAttributeAccessIssue]


def enable_flight_recorder(folder: Path) -> None:
    """Record collectives, and dump them to FOLDER/rank_N. Call it before the process group is created."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDS))
    os.environ.setdefault(_PREFIX, str(folder.absolute() / "rank_"))


def is_communication_error(error: BaseException | None) -> bool:
    """Whether this error, or one in its chain, comes from the process group."""
    if not isinstance(error, Exception):
        return False
    if isinstance(error, dist.DistError) or any(text in str(error) for text in GLOO_ERRORS):
        return True
    return is_communication_error(error.__cause__ or (None if error.__suppress_context__ else error.__context__))


def dump_flight_record(timeout_s: float, gil_timeout_s: float) -> None:
    """Write this rank's record if it is enabled. Errors are suppressed, since the process is ending.

    Args:
        timeout_s: after it the function returns: a file system may hang.
        gil_timeout_s: after it the process ends with exit code 1. A hung GPU may block the dump while it holds the
            GIL, so that no Python code could end the process.
    """
    thread = threading.Thread(target=_dump, args=(gil_timeout_s,), daemon=True)
    with suppress(RuntimeError):  # no more threads
        thread.start()
        thread.join(timeout_s)


def allow_graphs(count: int) -> None:
    """Let torch.compile make at least so many graphs of a function."""
    torch._dynamo.config.recompile_limit = max(count, torch._dynamo.config.recompile_limit)


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


@cache  # graphs depend on what they call, so blocks share them only if it is the same
def call_outside_of_graphs() -> Callable[..., Any]:
    """`call`, before which a graph of `compiled` ends and after which another one begins."""
    return torch.compiler.disable(call)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile, for functions that share their code but not their parameters.

    Inductor's kernels assume that addresses are multiples of 16 bytes if those of the first call were. It does not
    check those of parameters again, but in an engine's buffers the parameters of another block may lie elsewhere, and a
    GPU stops at a misaligned address.
    """
    return torch.compile(function, backend=_compile_for_any_address)


def _compile_for_any_address(graph: Any, inputs: Any) -> Any:
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    # The gradient of a split is a concatenation. One kernel of all its parts computes each of them for every element:
    # on an H200 it took 1.7 to 5 times as long as its bytes.
    parts = {"max_complex_pointwise_cat_inputs": 1} if hasattr(config, "max_complex_pointwise_cat_inputs") else {}

    def compile_inner(*arguments: Any, **options: Any) -> Any:
        # Inputs that are not static are checked in each call, and copied from other addresses.
        with config.patch(parts if options.get("is_backward") else {}):
            return compile_fx_inner(*arguments, **{**options, "static_input_idxs": ()})

    return compile_fx(graph, inputs, inner_compile=compile_inner)


def missing_compiler(device: torch.device) -> str:
    """Packages that torch.compile lacks for a device; empty: none."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    if device.type == "cuda" and not has_triton():
        return "the package triton"
    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, RuntimeError):
        return "a C++ compiler such as g++"
    return ""


def use_private_inductor_cache() -> None:
    """Keep torch.compile from running code that other users can write.

    torch's default folder has a known name in /tmp. If it is another user's or writable by others, a new temporary
    folder takes its place, unless TORCHINDUCTOR_CACHE_DIR names one. Precompiled headers have no other place.
    """
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    default = Path(default_cache_dir())
    with suppress(FileExistsError):
        default.mkdir(mode=0o700)
    status = default.lstat()
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022:
        return
    config.cpp_cache_precompile_headers = False
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(default)) == str(default):  # torch may have set it to the default
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="torchinductor_")


def argument_names(operator: Any) -> list[str]:
    """The names of an operator's arguments."""
    return [argument.name for argument in operator._schema.arguments]


def _dump(gil_timeout_s: float) -> None:
    with suppress(Exception), open(os.devnull, "w") as nowhere:
        path = Path(f"{os.environ[_PREFIX]}{dist.get_rank()}")
        faulthandler.dump_traceback_later(gil_timeout_s, exit=True, file=nowhere)
        try:
            record = _flight_record()
        finally:
            faulthandler.cancel_dump_traceback_later()
        path.parent.mkdir(exist_ok=True)  # of a run folder that was moved, none is made anew
        path.write_bytes(pickle.dumps(record))


def _flight_record() -> dict[str, Any]:
    """In the format of torchfrtrace."""
    from torch._C import _distributed_c10d
    from torch.distributed import distributed_c10d

    recorder = "nccl" if dist.get_backend() == "nccl" else "fr"
    dump = getattr(_distributed_c10d, f"_dump_{recorder}_trace")
    record = pickle.loads(dump(True, False, False))  # without stack traces: the first ones take 1.5 s
    if recorder == "fr":  # gloo does not record its groups
        record["pg_config"] = {
            name: {"name": name, "desc": group.group_desc, "ranks": str(dist.get_process_group_ranks(group))}
            for group, name in distributed_c10d._world.pg_names.items()
        }
    return record


def flash_attention(
    q_MHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, offsets: FlashOffsets, causal: bool = True, window: int = 0
) -> tuple[Tensor, Tensor]:
    """Flash attention in documents. The public `torch.nn.attention.varlen.varlen_attn` calls this operator, but has no
    window up to torch 2.11.

    Args:
        q_MHD, k_SGD, v_SGD: on CUDA, in a 16-bit type; D is a multiple of 8 and at most 256, G divides H.
        causal: the last query of a document attends to its last key; False: every query to all keys.
        window: a query attends to its own token and the window − 1 tokens before it; 0: all before it.

    Returns:
        y [M, H, D], differentiable, and the log-sum-exp of the scores [H, M], float32.
    """
    y_MHD, log_sum_HM, *_ = torch.ops.aten._flash_attention_forward(
        q_MHD, k_SGD, v_SGD, *offsets, 0.0, causal and not window, False,
        window_size_left=window - 1 if window else -1, window_size_right=0 if causal else -1,
    )  # fmt: skip
    return y_MHD, log_sum_HM


def flash_attention_backward(
    dy_MHD: Tensor,
    q_MHD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    y_MHD: Tensor,
    log_sum_HM: Tensor,
    offsets: FlashOffsets,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, and of some of the keys and values: y and the log-sum-exp are those of all keys."""
    random = dy_MHD.new_zeros(2, dtype=torch.uint64), dy_MHD.new_empty(0)  # of dropout
    return torch.ops.aten._flash_attention_backward(
        dy_MHD, q_MHD, k_SGD, v_SGD, y_MHD, log_sum_HM, *offsets, 0.0, causal, *random,
        window_size_left=-1, window_size_right=0 if causal else -1,
    )  # fmt: skip


def cpu_flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """y [B, H, T, D], and the log-sum-exp of the scores [B, H, T]; any floating dtype."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)


def cpu_flash_attention_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, log_sum: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, where y and the log-sum-exp are those of all keys."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return kernel(dy, q, k, v, y, log_sum, 0.0, causal)


class FakeFloats(TorchDispatchMode):
    """Inside, floating-point tensors are fake: they have a shape, a dtype and a size in memory, and no values.

    Integers (tokens, positions, document boundaries) are real, so code that reads them runs as in training. A number
    that is read from a fake tensor is 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it, the first operation would import torch's compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # as often as all others
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        if func is _READ_NUMBER and FakeTensor in types:
            return torch.zeros((), dtype=args[0].dtype).item()
        is_new = not pytree.tree_any(lambda x: isinstance(x, Tensor), (args, kwargs))
        if FakeTensor not in types and not is_new:
            return func(*args, **(kwargs or {}))
        out = self.faked(func, types, args, kwargs)
        if is_new and isinstance(out, Tensor) and not out.is_floating_point():
            return func(*args, **(kwargs or {}))
        return out

    def faked(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """The operator's result, without values."""
        return self._fake.dispatch(func, types, args, kwargs or {})
