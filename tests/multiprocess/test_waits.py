"""Where a training step and a decoding step wait for the device: each place where Python reads a value of a tensor,
or copies one from the host's memory."""

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from engine_state import whole_weights
from forked import CHECKOUT
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary
from training_on_layouts import BATCH, VOCAB, T, build_engine

from tost_lm.config import validate
from tost_lm.data.loader import Batch
from tost_lm.data.prefetch import micro_batches
from tost_lm.inference.decoding import Decoder, decoder
from tost_lm.inference.generation import Sampling, generate
from tost_lm.mixers.plugins import run_plugin
from tost_lm.mixers.registry import SPECS
from tost_lm.model import ModelConfig, TostLM
from tost_lm.model.streaming import prefill
from tost_lm.model.transforms import compile_blocks
from tost_lm.parallel.checksums import Checksums
from tost_lm.parallel.graceful_stop import GracefulStop, StopOfRanks, StopRequestedError
from tost_lm.parallel.settings import ParallelConfig
from tost_lm.pretrain.rank_times import RankTimes
from tost_lm.pretrain.step import train_step
from tost_lm.pretrain.tiled import Tiling, tile
from tost_lm.testing import Traffic, run_on_ranks

READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "multinomial"}
COPIES_TO_HOST = {"tolist", "numpy", "cpu"}
COPIES_OF_VALUES = {"tensor", "as_tensor", "asarray"}
NO_WAIT = {
    "optimizer.py:_get_value": "AdamW's count of steps, a host tensor",
    "chunked.py:chunks": "of the path of CPUs",
    "chunked.py:score_gradients": "of the path of CPUs",
    "chunked.py:__iter__": "of the path of CPUs",
    "chunked.py:_set_floor_": "of the path of CPUs",
    "chunked.py:_broken": "of the path of CPUs: whether delta layers read a NaN",
    "prefetch.py:<genexpr>": "from pinned memory, as tests/gpu/test_waits_gpu.py checks",
    "prefetch.py:_cu_seqlens": "the ends of documents, a host tensor",
    "layout.py:to_device": "through pinned memory, as tests/gpu/test_waits_gpu.py checks",
}
BETWEEN = {"test_waits.py", "overrides.py", "_compile.py"}
"""Files of frames between the place and the record of its wait."""


class Reads(TorchDispatchMode):
    """Records the functions that read values, also those of graphs."""

    def __init__(self, record: Callable[[], None]) -> None:
        super().__init__()
        self._record = record

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.partition("::")[2] in READS:
            self._record()
        return func(*args, **kwargs or {})


class Copies(TorchFunctionMode):
    """Records the functions that copy between the memory of the host and that of a GPU, on a machine without a GPU.

    What is made without a device is in the host's memory, and so is what is computed from it alone. All other tensors
    would be in the GPU's. A function copies if it is given a device and Python's values or a tensor of the host, or
    tensors of both. It uses a single number of the host without a copy. Not seen: `torch.FloatTensor(values)`, and
    lists as indices.
    """

    def __init__(self, record: Callable[[], None]) -> None:
        super().__init__()
        self._record, self._on_host = record, WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.__name__
        inputs = tree_leaves((args, kwargs))
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        of_host = [x for x in tensors if x in self._on_host]
        device = any(isinstance(x, str | torch.device) and str(x) == "cpu" for x in inputs)  # the only one here
        if name in COPIES_TO_HOST:
            stays, copies = True, len(of_host) < len(tensors)
        else:
            stays = not device and len(of_host) == len(tensors)
            copied = any(device or x.dim() for x in of_host) or (name in COPIES_OF_VALUES and not tensors)
            copies = copied and not stays
        if copies:
            self._record()
        results = func(*args, **kwargs)
        for x in tree_leaves(results):
            if isinstance(x, Tensor):
                (self._on_host.__setitem__ if stays else self._on_host.pop)(x, None)
        return results


@contextmanager
def copies_recorded(record: Callable[[], None]) -> Iterator[None]:
    mode, run = Copies(record), torch.autograd._engine_run_backward  # pyright: ignore[reportPrivateImportUsage]

    def run_in_mode(*args: Any, **kwargs: Any) -> Any:  # a mode is off inside the functions that it sees
        with mode:
            return run(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, mode:
        patch.setattr(torch.autograd, "_engine_run_backward", run_in_mode)
        yield


@contextmanager
def waits_counted() -> Iterator[dict[str, int]]:
    """How often the code waits in each place."""
    places: Counter[str] = Counter()

    def record() -> None:
        frames = (x for x in reversed(traceback.extract_stack()[:-1]) if Path(x.filename).name not in BETWEEN)
        frame = next(x for x in frames if "_dynamo" not in x.filename)
        place = f"{Path(frame.filename).name}:{frame.name}"
        if place not in NO_WAIT:
            places[place] += 1

    with Reads(record), copies_recorded(record):
        yield places


def waits_of_a_step(engine: Any, tiling: Tiling, batch: Callable[[int], Batch]) -> tuple[dict[str, int], int]:
    """The waits of a step, after two steps with other batches; and its messages of a few numbers."""
    columns = np.concatenate([np.arange(*tile.columns) for tile in tiling.tiles])
    stop = StopOfRanks(GracefulStop(), dist.get_world_size(), lambda: 0.0)
    times, checksums = RankTimes(engine.module, engine.mesh), Checksums(engine, 100)

    def step(number: int) -> None:
        tokens, labels, ends = batch(number)
        here = Batch(tokens[..., columns], labels[..., columns], ends)
        times.begin_step(0.0)
        train_step(
            engine, micro_batches(here, engine.mesh.device), tiling, 1e-3, before_update=checksums.before_update,
            stop=stop, numbers=times.take(),
        )  # fmt: skip
        checksums.after_update(number)

    for number in range(2):
        step(number)
    with Traffic() as traffic, waits_counted() as places:
        step(2)
    return dict(places), sum(sent.bytes <= FEW_NUMBERS for sent in traffic.sent)


def rows(step: int) -> Batch:
    tokens = np.random.default_rng(step).integers(VOCAB, size=(BATCH // 2, 2, T), dtype=np.int32)
    return Batch(tokens, tokens, np.empty(0, np.int64))


def packed(step: int) -> Batch:
    """Two samples in a row, with other documents in each step."""
    ends = [first + end for first in range(0, BATCH * T, T) for end in (3 + step, 11 + first // T, T)]
    tokens = rows(step).tokens.reshape(BATCH // 2, 1, 2 * T)
    return Batch(tokens, tokens, np.array(ends))


def compile_outside_copies(model: TostLM) -> None:
    """Compile blocks to graphs of PyTorch's own kernels. `Copies` does not see their forwards, for which they would be
    compiled again."""
    compile_function = torch.compile

    def compiled(function: Any, **options: Any) -> Any:
        graph = compile_function(function, **{**options, "backend": "aot_eager"})

        def call(*inputs: Any) -> Any:
            with torch._C.DisableTorchFunction():
                return graph(*inputs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", compiled)
        compile_blocks(model)


def waits_of_steps(parallel: ParallelConfig, bfloat16: bool, compiled: bool) -> list[tuple[dict[str, int], int]]:
    """Steps on rows and, if not compiled, on packed documents, and on packed documents in tiles."""
    prepare = compile_outside_copies if compiled else lambda model: None
    engine = build_engine(parallel, "adamw", bfloat16=bfloat16, softmax={"window": 8}, prepare=prepare)
    cases = [(rows, T, None)]
    if not compiled:
        cases += [(packed, 2 * T, None), (packed, 2 * T, 20)]
    return [waits_of_a_step(engine, tile(engine.mesh, tokens, size), batch) for batch, tokens, size in cases]


OF_UPDATE, FEW_NUMBERS = {"fsdp.py:update": 1}, 64  # bytes


@pytest.mark.parametrize(
    ("parallel", "bfloat16", "compiled"),
    [
        pytest.param(ParallelConfig(zero_stage=0, sequence=2), False, False, marks=pytest.mark.slow),
        pytest.param(ParallelConfig(), True, False, marks=pytest.mark.quick),
        (ParallelConfig(), True, True),
        pytest.param(ParallelConfig(sequence=2), True, False, marks=pytest.mark.slow),
        pytest.param(ParallelConfig(sequence=2), True, True, marks=pytest.mark.slow),
        pytest.param(ParallelConfig(sequence=2, zero_stage=3), True, False, marks=pytest.mark.slow),
    ],
    ids=["replicas in float32", "bfloat16", "compiled", "two ranks", "two ranks, compiled", "stage 3"],
)
def test_a_step_of_two_micro_batches_waits_only_for_the_loss_and_the_gradient_norm_at_its_end(
    parallel: ParallelConfig, bfloat16: bool, compiled: bool
):
    # What the ranks compared after the first micro-batch is read when the second one is queued.
    between = {"mesh.py:<lambda>": 1} if parallel.sequence > 1 else {}
    messages = 4 if parallel.sequence > 1 else 0  # labels, that comparison, losses with the votes, norm
    # Copies are compared every hundredth step, other memory before each update.
    of_memory = {"checksums.py:check": 1} if parallel.zero_stage else {}
    for of_rank in run_on_ranks(waits_of_steps, parallel.sequence, parallel, bfloat16, compiled):
        for waits, small in of_rank:
            assert waits == {"step.py:results": 1, **OF_UPDATE, **between, **of_memory}
            assert small == messages


def micro_batches_begun_before_a_stop() -> tuple[int, bool]:
    """How many of eight begin if the second rank receives a request in the third; and whether weights stay."""
    engine, graceful_stop, begun = build_engine(ParallelConfig(), "adamw", accumulation=8), GracefulStop(), []
    graceful_stop.start_training(lambda: "")

    def begin(*_: Any) -> None:
        begun.append(None)
        if len(begun) == 3 and engine.mesh.data.rank == 1:
            graceful_stop.request()

    engine.module.register_forward_pre_hook(begin)
    before, stop = whole_weights(engine), StopOfRanks(graceful_stop, dist.get_world_size(), lambda: 0.0)
    batches = 4 * micro_batches(rows(0), engine.mesh.device)
    with pytest.raises(StopRequestedError):
        train_step(engine, batches, tile(engine.mesh, T), 1e-3, stop=stop)
    return len(begun), all(torch.equal(before[name], weight) for name, weight in whole_weights(engine).items())


def test_a_stop_abandons_a_step_when_the_next_micro_batch_is_queued():
    assert run_on_ranks(micro_batches_begun_before_a_stop, 2) == [(4, True)] * 2


EMA = (CHECKOUT / "experiments/gated_ema.py").read_text()
PLUGINS = {"E": EMA, "H": (CHECKOUT / "experiments/hgrn2.py").read_text()}


@pytest.fixture
def pattern(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The letter of a mixer, or of a plugin."""
    if text := PLUGINS.get(request.param):
        (tmp_path / "plugin.py").write_text(text)
        run_plugin(tmp_path / "plugin.py")
    yield request.param
    if text:
        del SPECS[request.param]


SETTINGS = [
    {"softmax": {"window": 8}},
    {"positions": "none", "tssa": {"denom_bias": "head"}, "softmax": {"kv_heads": 1, "qk_norm": True}},
    {"positions": "none", "softmax": {"rope_theta": 0.0}},
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("pattern", [*SPECS, *PLUGINS], indirect=True)
def test_the_second_decoding_step_waits_for_nothing_but_its_token(pattern: str, settings: dict[str, Any]):
    """It is the code that is captured on a GPU, so the steps after it are equal."""
    shape = {"layers": 2, "heads": 2, "width": 16, "vocab_size": VOCAB, "layer_scale": 1.0}
    model = TostLM(validate(ModelConfig, {"pattern": pattern, **shape, **settings}, "test")).eval()
    output = prefill(model, [torch.zeros(1, 5, dtype=torch.int64)])
    assert output.state is not None
    assert isinstance(decoder(model, output.state), Decoder)
    ids = generate(model, output, 9, Sampling(0.8, top_k=5), None, VOCAB)
    next(ids)  # of the prompt
    next(ids)
    with waits_counted() as places:
        next(ids)
    assert places == {"generation.py:chosen_ids": 1}


class _CopiesBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return d * torch.tensor([1.0, 2.0], device=d.device)


X, DEVICE = torch.zeros(2, requires_grad=True), torch.device("cpu")
ONES = torch.ones(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("function", "times"),
    [
        (lambda: torch.arange(2).to(DEVICE), 1),
        (lambda: torch.tensor([1], device=DEVICE), 1),
        (lambda: torch.as_tensor(np.ones(2), device="cpu"), 1),
        (lambda: X[torch.tensor([0])], 1),
        (lambda: torch.zeros_like(X).copy_(torch.ones(2)), 1),
        (lambda: (X + 1).tolist(), 1),
        (lambda: X.detach().cpu() + 1, 1),
        (lambda: _CopiesBackward.apply(X).sum().backward(), 1),  # pyright: ignore[reportAttributeAccessIssue]
        (lambda: torch.tensor([1, 2]).cumsum(0).tolist(), 0),
        (lambda: torch.arange(2, device=DEVICE) + ONES, 0),
        (lambda: X.to(DEVICE)[ONES], 0),
        (lambda: X * torch.tensor(2.0), 0),
        (lambda: torch.as_tensor(X, device=DEVICE) + 1, 0),
    ],
)
def test_copies_are_recorded(function: Callable[[], object], times: int):
    recorded: list[None] = []
    with copies_recorded(lambda: recorded.append(None)):
        function()
    assert len(recorded) == times
