"""Cells of `benchmarks.parallel` on gloo ranks: bytes that a layer sends, and training steps in turns."""

import time
from collections.abc import Callable, Mapping
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measure import call_seconds
from tost_lm.config import validate
from tost_lm.data.prefetch import MicroBatch
from tost_lm.model import ModelConfig, TostLM
from tost_lm.optim.adamw import OPTIMIZER as ADAMW
from tost_lm.optim.settings import OptimConfig
from tost_lm.parallel.apply import even_split, parallelize, shard_of
from tost_lm.parallel.mesh import Mesh, World, build_mesh, max_over_ranks, start_world
from tost_lm.parallel.settings import ParallelConfig
from tost_lm.parallel.zero import build_engine
from tost_lm.pretrain.step import train_step
from tost_lm.pretrain.tiled import TiledLM, tile
from tost_lm.testing import Traffic, run_on_ranks
from tost_lm.torch_internals import FUNCTIONAL_COLLECTIVES

LIMIT_S = 600
TOGETHER, ALONE = "together", "alone"
EXCHANGES = {"all_gather_into_tensor", "all_to_all_single"}
SEQUENCE, TENSOR = "sequence", "tensor"


def bytes_sent_by_a_layer(ranks: int, tokens: int, model: Mapping[str, Any]) -> float:
    """Bytes that a rank passes to collectives in forward and backward of a model with one TSSA layer, for one
    sequence: the mean over ranks. Nothing else in the model communicates."""
    return mean(run_on_ranks(_bytes_sent, ranks, tokens, model, timeout_s=LIMIT_S))


def time_in_turns(axis: str, ranks: int, model: Mapping[str, Any], tokens: int, rounds: int) -> dict[str, Any]:
    """Training steps of all ranks together, along `axis`, in turns with steps of each alone.

    Returns:
        `seconds` of each round until the last rank has finished, by kind; `sent_bytes` of a step together, of the rank
        that sends most; `exchange_bytes`, what TSSA layers send of them between sequence ranks; `exchange_fractions`,
        the fraction of each step that a rank spends there (mean over ranks; empty except on the sequence axis).
    """
    turns = run_on_ranks(_train_in_turns, ranks, axis, model, tokens, rounds, timeout_s=LIMIT_S)
    return {
        "seconds": {
            kind: [max(seconds) for seconds in zip(*(rank.seconds[kind] for rank in turns), strict=True)]
            for kind in (TOGETHER, ALONE)
        },
        "sent_bytes": max(rank.sent_bytes for rank in turns),
        "exchange_bytes": max(rank.exchange_bytes for rank in turns),
        "exchange_fractions": [
            sum(fractions) / ranks for fractions in zip(*(rank.exchange_fractions for rank in turns), strict=True)
        ],
    }


class Turns(NamedTuple):
    """The values of one rank, as in `time_in_turns`."""

    seconds: dict[str, list[float]]
    sent_bytes: int
    exchange_bytes: int
    exchange_fractions: list[float]


class ExchangeClock(TorchDispatchMode):
    """Sums up the seconds that this thread spends in the collectives of `tost_lm.parallel.mesh`."""

    def __init__(self):
        super().__init__()
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func.namespace != FUNCTIONAL_COLLECTIVES.name:
            return func(*args, **(kwargs or {}))
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        self.seconds += time.perf_counter() - start
        return result


def _bytes_sent(tokens: int, settings: Mapping[str, Any]) -> int:
    world = start_world("cpu")
    mesh = build_mesh(world, ParallelConfig(sequence=world.size))
    split = even_split(mesh, tokens)
    model = _model(settings, mesh)
    tokens_BT = split.shard(torch.zeros(1, tokens, dtype=torch.int64))
    with Traffic() as traffic:
        output = model(tokens_BT, labels=tokens_BT, label_count=tokens, output_state=False, shard=shard_of(mesh, split))
        output.loss.backward()
    return traffic.bytes


def _train_in_turns(axis: str, model: Mapping[str, Any], tokens: int, rounds: int) -> Turns:
    world = start_world("cpu")
    together, alone = _meshes(world, axis)
    steps = {
        TOGETHER: _training_step(together, model, tokens * together.sequence.size * together.tensor.size),
        ALONE: _training_step(alone, model, tokens),
    }
    # In the first step the optimizer creates its state.
    with Traffic() as traffic:
        steps[TOGETHER]()
    with Traffic() as alone_traffic:
        steps[ALONE]()
    assert {sent.group for sent in alone_traffic.sent} == {alone.data.group.group_name}

    seconds: dict[str, list[float]] = {kind: [] for kind in steps}
    exchange_fractions = []
    for _ in range(rounds):
        for kind, step in steps.items():
            _wait_for_all()
            seconds[kind].append(call_seconds(step, "cpu"))
        if axis == SEQUENCE:
            _wait_for_all()
            with ExchangeClock() as clock:
                step_seconds = call_seconds(steps[TOGETHER], "cpu")
            exchange_fractions.append(clock.seconds / step_seconds)
    exchange = [sent.bytes for sent in traffic.sent if axis == SEQUENCE and sent.kind in EXCHANGES]
    return Turns(seconds, traffic.bytes, sum(exchange), exchange_fractions)


def _meshes(world: World, axis: str) -> tuple[Mesh, Mesh]:
    """A mesh of all ranks along one axis, and one of each rank alone."""
    itself = build_mesh(world, ParallelConfig(sequence=world.size)).data
    axes = {axis: world.size} if axis in (SEQUENCE, TENSOR) else {}
    together = build_mesh(world, validate(ParallelConfig, axes, "benchmarks.parallel"))
    return together, Mesh(itself, itself, itself, itself, world.device, itself)


def _training_step(mesh: Mesh, model: Mapping[str, Any], seq_len: int) -> Callable[[], object]:
    """A training step on one sequence, of which this rank has a shard."""
    torch.manual_seed(0)
    optim = OptimConfig()
    sharded = _model(model, mesh)
    engine = build_engine(
        sharded, ADAMW.build(sharded, optim), mesh, ParallelConfig(zero_stage=1),
        micro_batch_size=1, accumulation=1, grad_clip=optim.grad_clip, bfloat16=False,
    )  # fmt: skip
    tiling = tile(mesh, seq_len)
    windows = torch.randint(sharded.config.vocab_size, (1, seq_len + 1))
    here = slice(*tiling.tiles[0].columns)
    batch = MicroBatch(windows[:, :-1][:, here], windows[:, 1:][:, here])
    return lambda: train_step(engine, [batch], tiling, optim.lr)


def _model(settings: Mapping[str, Any], mesh: Mesh) -> TostLM:
    return parallelize(TiledLM(validate(ModelConfig, dict(settings), "benchmarks.parallel")), mesh)


def _wait_for_all() -> None:
    max_over_ranks(0)
