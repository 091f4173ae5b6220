"""A training step of one rank of a world of any size, on fake tensors, in a process with a process group of its own."""

import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

from fake_rank import FakeRank, fake_world
from memory_of_training import Settings

from tost_lm.config import validate
from tost_lm.pretrain.plan.settings import PlanConfig
from tost_lm.testing.ranks import PRELOADED

KINDS = {
    "all-gather": {"all_gather_into_tensor", "c10d._allgather_base_"},
    "reduce-scatter": {"reduce_scatter_tensor", "c10d._reduce_scatter_base_"},
    "all-reduce": {"all_reduce", "c10d.allreduce_"},
    "all-to-all": {"all_to_all_single"},
}
"""Names of torch and its dispatcher, by the plan's names."""


class Message(NamedTuple):
    """A collective of a rank."""

    kind: str
    """As the plan names it."""
    axis: str
    """The ranks that take part, a field of `Mesh`."""
    bytes: int


class Executed(NamedTuple):
    """Messages and memory of one rank in a step."""

    messages: list[Message]
    """In order."""
    peak: int
    """Bytes of live tensors at their peak."""

    @property
    def sent(self) -> dict[str, tuple[int, int]]:
        """Calls and bytes, by kind of collective."""
        calls, size = Counter[str](), Counter[str]()
        for message in self.messages:
            calls[message.kind] += 1
            size[message.kind] += message.bytes
        return {kind: (calls[kind], size[kind]) for kind in calls}


def executed(settings: Settings, world: int, ranks: Iterable[int], **changed: Any) -> list[Executed]:
    """The steps of these ranks. `changed`: names in `tost_lm.parallel.sequence`."""
    return in_process(_execute, settings, world, [*ranks], changed)


def executed_long(settings: Settings, world: int, ranks: Iterable[int]) -> list[Executed]:
    """The same for long rows in bfloat16, in minutes.

    Attention is the call of flash attention that GPUs make, without the masks of CPUs. Delta layers compute as many
    chunks at once as GPUs do. Loops over chunks and parts of rows, which only write into tensors that exist, have one
    turn.
    """
    return in_process(_execute_long, settings, world, [*ranks])


def in_process(fn: Callable[..., Any], *args: Any) -> Any:
    """The result of `fn` in a process without a process group."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, context) as process:
        return process.submit(fn, *args).result()


def _execute(settings: Settings, world: int, ranks: list[int], changed: dict[str, Any]) -> list[Executed]:
    import torch

    from tost_lm.parallel import sequence

    torch.set_num_threads(1)
    for name, value in changed.items():
        setattr(sequence, name, value)
    config = validate(PlanConfig, {**settings, "cluster": {"gpus_per_node": world}}, "test")
    return [_execute_rank(config, rank) for rank in ranks]


def _execute_long(settings: Settings, world: int, ranks: list[int]) -> list[Executed]:
    from tost_lm.mixers.delta import chunked, groups
    from tost_lm.mixers.softmax import attention
    from tost_lm.ops import short_conv

    once: dict[str, Any] = {"range": lambda *bounds: range(*bounds)[:1], "enumerate": lambda chunks: [(0, chunks[0])]}
    changes: list[tuple[Any, dict[str, Any]]] = [
        (chunked, once), (short_conv, {"range": once["range"]}), (attention, {"obstacle_to_kernels": lambda *_: None}),
        (groups, {"GROUP_ELEMENTS": groups.DEVICE_GROUP_ELEMENTS}),
    ]  # fmt: skip
    for module, values in changes:
        for name, value in values.items():
            setattr(module, name, value)
    return _execute(settings, world, ranks, {})


def _execute_rank(config: PlanConfig, number: int) -> Executed:
    """The step before has one token on each rank: the optimizer has its state then."""
    import torch

    from tost_lm.data.prefetch import MicroBatch
    from tost_lm.parallel.mesh import build_mesh
    from tost_lm.pretrain.batches import tiling_of
    from tost_lm.pretrain.engine import build_training_engine
    from tost_lm.pretrain.step import train_step
    from tost_lm.pretrain.tiled import tile

    def micro_batches(tokens: int) -> list[MicroBatch]:
        zeros = torch.zeros(config.train.micro_batch_size if tokens > 1 else 1, tokens, dtype=torch.int64)
        return [MicroBatch(zeros, zeros)] * config.accumulation(config.cluster.ranks)

    with fake_world(number, config.cluster.ranks) as world:
        mesh = build_mesh(world, config.parallel)
        axes = {getattr(mesh, axis).group: axis for axis in ("copies", "shards", "replicas", "sequence", "tensor")}
        axes = {group.group_name: axis for group, axis in axes.items() if group}
        tiling = tiling_of(config, mesh)
        with FakeRank() as rank:
            engine = build_training_engine(config, mesh)
            train_step(engine, micro_batches(1), tile(mesh, mesh.sequence.size), config.optim.lr)
            todo = micro_batches(sum(end - start for start, end in (tile.columns for tile in tiling.tiles)))
            rank.restart()
            train_step(engine, todo, tiling, config.optim.lr)
    names = {name: kind for kind, names in KINDS.items() for name in names}
    return Executed([Message(names.get(x.kind, x.kind), axes[x.group], x.bytes) for x in rank.sent], rank.peak)
