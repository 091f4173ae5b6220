"""What `benchmarks.parallel` does on gloo ranks: counting what a layer sends, and training steps in turns."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measure import call_seconds
from benchmarks.parallel import SEQUENCE, TENSOR, ScalingConfig, model_settings
from tost_lm.config import validate
from tost_lm.data.prefetch import MicroBatch
from tost_lm.model import ModelConfig, TostLM
from tost_lm.optim.adamw import build_adamw
from tost_lm.optim.config import OptimConfig
from tost_lm.parallel.apply import even_split, parallelize, shard_of
from tost_lm.parallel.collectives import OPERATORS
from tost_lm.parallel.config import ParallelConfig
from tost_lm.parallel.mesh import Mesh, build_mesh
from tost_lm.parallel.world import World, mean_over_ranks, start_world
from tost_lm.parallel.zero import build_engine
from tost_lm.testing import Traffic, run_on_ranks
from tost_lm.training.step import train_step
from tost_lm.training.tiled import TiledLM, tile

LIMIT_S = 600
TOGETHER, ALONE = "together", "alone"


def bytes_sent_by_a_layer(ranks: int, tokens: int, heads: int, channels: int) -> int:
    """What a rank hands to its collectives, at most, in the forward and backward of a model of one TSSA layer that
    shares one sequence of so many tokens. Nothing else of the model sends anything."""
    return max(run_on_ranks(_bytes_sent, ranks, tokens, heads, heads * channels, timeout_s=LIMIT_S))


def take_turns(axis: str, ranks: int, model: Mapping[str, Any], tokens: int, rounds: int) -> dict[str, Any]:
    """Training steps of all ranks together, along `axis`, in turns with steps of each alone.

    Returns:
        `seconds` of each round until the last rank was done, by kind; `sent_bytes` of a step together, of the rank that
        sends most, `exchange_bytes` of them by the TSSA layers along the sequence, and `exchange_shares`, the share of
        each round's step that a rank spends there (mean over ranks; empty but on the sequence axis).
    """
    told = run_on_ranks(_train_in_turns, ranks, axis, model, tokens, rounds, timeout_s=LIMIT_S)
    return {
        "seconds": {
            kind: [max(seconds) for seconds in zip(*(rank.seconds[kind] for rank in told), strict=True)]
            for kind in (TOGETHER, ALONE)
        },
        "sent_bytes": max(rank.sent_bytes for rank in told),
        "exchange_bytes": max(rank.exchange_bytes for rank in told),
        "exchange_shares": [
            sum(shares) / ranks for shares in zip(*(rank.exchange_shares for rank in told), strict=True)
        ],
    }


class Turns(NamedTuple):
    """What one rank found, as in `take_turns`."""

    seconds: dict[str, list[float]]
    sent_bytes: int
    exchange_bytes: int
    exchange_shares: list[float]


class ExchangeClock(TorchDispatchMode):
    """Sums up the seconds that this thread spends in the collectives of `tost_lm.parallel.collectives`."""

    def __init__(self):
        super().__init__()
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func.namespace != OPERATORS.name:
            return func(*args, **(kwargs or {}))
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        self.seconds += time.perf_counter() - start
        return result


def _bytes_sent(tokens: int, heads: int, width: int) -> int:
    world = start_world("cpu")
    mesh = build_mesh(world, ParallelConfig(sequence=world.size))
    split = even_split(mesh, tokens)
    model = _model(model_settings(ScalingConfig(layers=1, heads=heads, width=width)), mesh)
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
    # The first step of each, in which the optimizer makes its state.
    with Traffic() as traffic:
        steps[TOGETHER]()
    with Traffic() as to_itself:
        steps[ALONE]()
    assert {sent.group for sent in to_itself.sent} == {alone.data.group.group_name}

    seconds: dict[str, list[float]] = {kind: [] for kind in steps}
    exchange_shares = []
    for _ in range(rounds):
        for kind, step in steps.items():
            _wait_for_all()
            seconds[kind].append(call_seconds(step, "cpu"))
        if axis == SEQUENCE:
            _wait_for_all()
            with ExchangeClock() as clock:
                step_seconds = call_seconds(steps[TOGETHER], "cpu")
            exchange_shares.append(clock.seconds / step_seconds)
    exchange = [sent.bytes for sent in traffic.sent if axis == SEQUENCE and sent.kind == "all_gather_into_tensor"]
    return Turns(seconds, traffic.bytes, sum(exchange), exchange_shares)


def _meshes(world: World, axis: str) -> tuple[Mesh, Mesh]:
    """All ranks along one axis, and each by itself."""
    itself = build_mesh(world, ParallelConfig(sequence=world.size)).data
    axes = {axis: world.size} if axis in (SEQUENCE, TENSOR) else {}
    together = build_mesh(world, validate(ParallelConfig, axes, "benchmarks.parallel"))
    return together, Mesh(itself, itself, itself, itself, world.device)


def _training_step(mesh: Mesh, model: Mapping[str, Any], sequence_tokens: int) -> Callable[[], object]:
    """A whole step on one sequence, of which this rank has its shard."""
    torch.manual_seed(0)
    optim = OptimConfig()
    spread = _model(model, mesh)
    engine = build_engine(
        spread, build_adamw(spread, optim), mesh, ParallelConfig(zero_stage=1),
        micro_batch_sequences=1, accumulation=1, grad_clip=optim.grad_clip, bfloat16=False,
    )  # fmt: skip
    tiling = tile(mesh, sequence_tokens)
    windows = torch.randint(spread.config.vocab_size, (1, sequence_tokens + 1))
    here = slice(*tiling.tiles[0].columns)
    batch = MicroBatch(windows[:, :-1][:, here], windows[:, 1:][:, here])
    return lambda: train_step(engine, [batch], tiling, optim.lr)


def _model(settings: Mapping[str, Any], mesh: Mesh) -> TostLM:
    return parallelize(TiledLM(validate(ModelConfig, dict(settings), "benchmarks.parallel")), mesh)


def _wait_for_all() -> None:
    mean_over_ranks(torch.zeros(()))
