"""Operations that a GPU would launch for a micro-batch of packed documents, counted without a GPU.

    PYTHONPATH=.venv/fla python -m benchmarks.launches      (where the environment was made without a GPU)

The code runs as on CUDA in bfloat16, on tensors of the CPU whose results are not computed: Triton kernels and flash
attention are counted and return what is in memory. Counted are launches of Triton kernels and operations of torch's
dispatcher, without views and allocations. A fused matrix product is one operation, and an operation may launch several
kernels. The counts depend on the layers and on the documents, not on the width. A second table has the kernels of a
block under torch.compile, as Inductor generates them for a Hopper GPU, and what its operators launch. Output: two
tables, and results/benchmarks/.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
from pydantic import Field, PositiveInt
from torch import Tensor
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from benchmarks import measure
from benchmarks.hopper import COUNTS, kernels_of
from tost_lm.command_line import run_program
from tost_lm.config import Section, validate
from tost_lm.mixers.counted import is_launched
from tost_lm.mixers.layer import TokenMixer
from tost_lm.model import ModelConfig, TostLM
from tost_lm.model.transforms import compile_blocks
from tost_lm.ops.positions import SequenceInfo
from tost_lm.ops.rotary import Rotary
from tost_lm.torch_internals import TorchDispatchMode, pytree


class CountConfig(Section):
    """The models and the micro-batch that are counted."""

    models: list[str] = Field(default=["T", "D", "A", "tost-base", "delta-350m"], min_length=1)
    """Layers, by a letter of `model.pattern`, or presets."""
    rows: PositiveInt = 16
    """Rows of a micro-batch, packed into one."""
    seq_len: PositiveInt = 1024
    """Tokens of a row."""
    documents: PositiveInt = 28
    """Documents in all rows, at least as many as these."""


class LaunchesConfig(Section):
    """Settings of `benchmarks.launches`."""

    count: CountConfig = CountConfig()


def run(config: LaunchesConfig, device: str) -> tuple[list[dict[str, Any]], str]:

    settings = config.count
    cells = [count(name, settings.rows, settings.seq_len, settings.documents) for name in settings.models]
    rows = [
        {
            "": f"one {cell['model']} layer" if len(cell["model"]) == 1 else cell["model"],
            "forward": f"{cell['forward']:,}",
            "backward": f"{cell['backward']:,}",
            "together": f"{cell['forward'] + cell['backward']:,}",
        }
        for cell in cells
    ]
    layers = [count_compiled(name) for name in settings.models if len(name) == 1]
    compiled = [
        {
            "forward + backward": f"one {layer['model']} block of {layer['preset']}, compiled",
            **{name: f"{layer['forward'][name]} + {layer['backward'][name]}" for name in COUNTS},
            "bytes": " + ".join(f"{layer[one]['bytes_per_channel']:.1f}" for one in PASSES),
            "launched": " + ".join(f"{layer[one]['launched']}" for one in PASSES),
            "bytes of these": " + ".join(f"{layer[one]['launched_bytes_per_channel']:.1f}" for one in PASSES),
        }
        for layer in layers
    ]
    text = (
        f"{measure.markdown_table(rows)}\n\n{settings.rows} × {settings.seq_len:,} tokens in {cells[0]['documents']} "
        "documents. Operations without views, allocations and the optimizer. Layers are without norm, residual and "
        "MLP.\n\n"
        f"{measure.markdown_table(compiled)}\n\nGenerated kernels, and products of matrices, of a block with norms, "
        "residuals and MLP in bfloat16. Bytes are those that generated kernels read and write, per token and channel. "
        "Launched are kernels and operations of torch in the operators, which run between the graphs; bytes of these "
        "are those of the tensors that they read or write."
    )
    return [*cells, *layers], text


main = measure.benchmark("launches", run)


class Operations(TorchDispatchMode):
    """Counts operations that launch something, by name, and the bytes of the tensors that they read or write."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_launched(func):
            self.add(func.name(), args, kwargs, result)
        return result

    def add(self, name: str, *tensors: Any) -> None:
        self.counts[name] += 1
        self.bytes += sum(x.numel() * x.itemsize for x in pytree.tree_leaves(tensors) if isinstance(x, Tensor))


@contextmanager
def as_on_cuda(operations: Operations) -> Iterator[None]:
    """Tensors say that they are on CUDA, and its kernels are counted instead of run."""

    def launch(kernel: Any, *arguments: Any, **named: Any) -> None:
        operations.add(f"triton::{getattr(kernel, 'fn', kernel).__name__}", arguments, named)

    def flash_forward(q: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        return torch.empty_like(q), q.new_empty(q.shape[1], len(q)), *(q.new_empty(0) for _ in range(3))

    def flash_backward(_: Tensor, *qkv: Any, **__: Any) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x) for x in qkv[:3])

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", flash_forward, "CPU")
    library.impl("_flash_attention_backward", flash_backward, "CPU")
    runs = {kind: kind.run for kind in (JITFunction, InterpretedFunction, Autotuner)}
    try:
        for kind in runs:
            kind.run = launch  # pyright: ignore[reportAttributeAccessIssue]
        torch.Tensor.is_cuda = property(lambda _: True)  # pyright: ignore[reportAttributeAccessIssue]
        torch.Tensor.is_cpu = property(lambda _: False)  # pyright: ignore[reportAttributeAccessIssue]
        yield
    finally:
        del torch.Tensor.is_cuda, torch.Tensor.is_cpu
        for kind, run in runs.items():
            kind.run = run  # pyright: ignore[reportAttributeAccessIssue]
        library._destroy()


def counted(forward: Callable[[], Any]) -> tuple[Operations, Operations]:
    """The operations of a forward and of its backward."""

    def run(call: Callable[[], Any]) -> tuple[Any, Operations]:
        operations = Operations()
        with as_on_cuda(operations), operations:
            return call(), operations

    run(forward)  # fills caches of offsets
    outputs, of_forward = run(forward)
    outputs = [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad]
    gradients = list(map(torch.ones_like, outputs))
    return of_forward, run(lambda: torch.autograd.backward(outputs, gradients))[1]


def count(
    name: str, rows: int, seq_len: int, documents: int, settings: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Operations of a model, or of one layer with settings of its own, forward and backward."""
    layer = len(name) == 1
    model, tokens, cu_seqlens = _packed(name, rows, seq_len, documents, {**SMALL, **settings})
    x_BTC, info = _layer_input(model, tokens, cu_seqlens)

    def forward() -> Tensor:
        if layer:
            return model.blocks[0].mixer(x_BTC, None, info)[0]  # pyright: ignore[reportCallIssue]
        loss = model(tokens, tokens, cu_seqlens=cu_seqlens, label_count=1.0, output_state=False).loss
        assert loss is not None
        return loss

    forward_counts, backward_counts = (found.counts for found in counted(forward))
    return {
        "model": name,
        "documents": len(cu_seqlens) - 1,
        "forward": forward_counts.total(),
        "backward": backward_counts.total(),
        "forward_operations": dict(forward_counts.most_common()),
        "backward_operations": dict(backward_counts.most_common()),
    }


PRESETS = {"T": "tost-base", "D": "delta-350m", "A": "delta-350m"}
PASSES = ("forward", "backward")
COMPILED_TOKENS, OPERATOR_TOKENS = 32768, 4096
"""Of a micro-batch of delta_350m, for which Inductor fuses sums over tokens with those over channels, and of the calls
of operators, which are computed."""


def count_compiled(letter: str) -> dict[str, Any]:
    """Kernels of one block under torch.compile, in the width of a preset: those that Inductor generates, calls of
    products of matrices, and what the operators between its graphs launch."""
    model, tokens, cu_seqlens = _packed(letter, 1, COMPILED_TOKENS, 3, {"preset": PRESETS[letter]})
    x_BTC, info = _layer_input(compile_blocks(model), tokens, cu_seqlens)
    x_BTC = x_BTC.detach().float().requires_grad_()
    found = kernels_of(lambda: model.blocks[0](x_BTC, None, info))
    operators = count_in_operators(letter)
    of_passes = {
        which: {
            **{name: getattr(kernels, name) for name in COUNTS},
            "bytes_per_channel": kernels.bytes / x_BTC.numel(),
            "kernels": [[name, kernels.bytes_of[name]] for name in kernels.calls],
            "launched": sum(one.counts.total() for one in inside),
            "launched_bytes_per_channel": sum(one.bytes for one in inside) / (OPERATOR_TOKENS * x_BTC.shape[-1]),
            "launched_operations": dict(sum((one.counts for one in inside), Counter()).most_common()),
        }
        for which, kernels, inside in zip(PASSES, found, zip(*operators, strict=True), strict=True)
    }
    return {"model": letter, "preset": PRESETS[letter], **of_passes}


def count_in_operators(letter: str) -> list[tuple[Operations, Operations]]:
    """What each operator of a block launches, forward and backward."""
    model, tokens, cu_seqlens = _packed(letter, 1, OPERATOR_TOKENS, 3, {"preset": PRESETS[letter]})
    x_BTC, info = _layer_input(model, tokens, cu_seqlens)
    calls: list[Callable[[], Any]] = []

    def eager(operator: Callable[..., Any], *arguments: Any) -> Any:
        alone = pytree.tree_map_only(Tensor, lambda x: x.detach().requires_grad_(x.requires_grad), arguments)
        calls.append(partial(operator, *alone))
        return operator(*arguments)

    with patch.object(TokenMixer, "eager", staticmethod(eager)), as_on_cuda(Operations()):
        model.blocks[0].mixer(x_BTC, None, info)  # pyright: ignore[reportCallIssue]
    return [counted(one) for one in calls]


SMALL = {"width": 192, "heads": 12}


def _packed(
    name: str, rows: int, seq_len: int, documents: int, size: dict[str, Any] = SMALL
) -> tuple[TostLM, Tensor, Tensor]:
    """A model of a preset, or of one layer; its tokens and their offsets."""
    shape = {"pattern": name, "layers": 1} if len(name) == 1 else {"preset": name}
    others = {"vocab_size": 512, "max_positions": seq_len}
    model = TostLM(validate(ModelConfig, {**size, **shape, **others}, "benchmarks.launches")).bfloat16()
    cuts = {*range(0, rows * seq_len + 1, seq_len), *range(0, rows * seq_len, rows * seq_len // documents)}
    tokens = torch.zeros(1, rows * seq_len, dtype=torch.int64)
    return model, tokens, torch.tensor(sorted(cuts), dtype=torch.int32)


def _layer_input(model: TostLM, tokens: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, SequenceInfo]:
    settings = model.config
    info = SequenceInfo.of(tokens, None, cu_seqlens, output_state=False)
    x_BTC = torch.zeros(*tokens.shape, settings.width, dtype=torch.bfloat16, requires_grad=True)
    return x_BTC, info.with_rotary(Rotary(settings.width // settings.heads, 10000.0), torch.float32)


if __name__ == "__main__":
    run_program(main, name="benchmarks.launches", doc=__doc__ or "", positional="[CONFIG]", config=LaunchesConfig)
