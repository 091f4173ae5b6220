"""Execution of a plan: the training step of one rank of each class, on fake tensors; what these ranks send and hold,
whether the collectives of all ranks match, and the plan beside them.

Ranks are in one class if all their tensors have equal shapes: those with slices of equal length, with equal numbers of
documents and of the operators' chunks in each tile, and with columns to scan for other ranks in the same exchanges.
Sequence ranks that pass states on are in classes of their own. In an A layer also the lengths of documents and of what
they attend to are equal. The lengths of documents may differ otherwise, and the tensors that a partition of ZeRO
consists of.

Everything of the step runs: the loader, the model, its parallel layers, and at ZeRO stages 0 to 2 DeepSpeed.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import torch

from tost_lm.data.loader import Batch, BatchShard, Corpora, TrainingBatches
from tost_lm.data.prefetch import MicroBatch, micro_batches
from tost_lm.errors import ConfigError, DataError
from tost_lm.mixers.registry import facts_of, mixer_class
from tost_lm.ops.layout import LocalDocuments
from tost_lm.parallel.agreement import rank_numbers
from tost_lm.parallel.fake_rank import FakeRank, fake_world, ranks_of_group
from tost_lm.parallel.mesh import Axis, Mesh, build_mesh
from tost_lm.parallel.zero import own_state, summed_gradients
from tost_lm.pretrain.loop import build_training_engine
from tost_lm.pretrain.plan import estimate as plan
from tost_lm.pretrain.plan.activations import load_of
from tost_lm.pretrain.plan.settings import PlanConfig
from tost_lm.pretrain.step import build_batches, tiling_of, train_step
from tost_lm.pretrain.tiled import Tile, tile, tile_batches
from tost_lm.testing.ranks import Sent

AXES = ("rank", "tensor", "sequence", "data", "replicas", "world")
"""The groups of a rank; `rank` is itself alone."""
FEW_NUMBERS_BYTES = 16
"""Up to so many: label counts, losses and norms of a step, which the plan does not count."""
_LONGEST_LOOP = 64


class Message(NamedTuple):
    """A collective of a rank."""

    kind: str
    """A kind of `plan.Collectives`, or torch's name."""
    axis: str
    """The group: one of `AXES`."""
    bytes: int
    """Size of the tensors that the rank passes to it."""
    rows: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """For an all-to-all: rows for each rank of the group, and rows from each."""

    def __str__(self) -> str:
        return f"{self.kind} over {self.axis} of {self.bytes:,} bytes"


class ExecutedClass(NamedTuple):
    """Ranks whose tensors have equal shapes. The first of them ran."""

    ranks: tuple[int, ...]
    messages: tuple[Message, ...]
    """In order."""
    peak: dict[str, int]
    """Bytes of live tensors at their peak, by use."""


class RankLayout(NamedTuple):
    """Ranks = tensor × sequence × data; tensor varies fastest, then sequence."""

    tensor: int
    sequence: int
    world: int

    @property
    def data(self) -> int:
        return self.world // (self.tensor * self.sequence)

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Tensor, sequence and data rank."""
        return rank % self.tensor, rank // self.tensor % self.sequence, rank // (self.tensor * self.sequence)

    def group(self, axis: str, rank: int) -> range:
        """The ranks of this rank's group."""
        block = self.tensor * self.sequence
        tensor, _, data = self.coordinates(rank)
        return {
            "rank": range(rank, rank + 1),
            "tensor": range(rank - tensor, rank - tensor + self.tensor),
            "sequence": range(data * block + tensor, (data + 1) * block, self.tensor),
            "data": range(rank % block, self.world, block),
            "replicas": range(tensor, self.world, self.tensor),
            "world": range(self.world),
        }[axis]

    def axis_of(self, ranks: Sequence[int], rank: int) -> str:
        """The first axis whose group of `rank` has these ranks."""
        return next(axis for axis in AXES if tuple(self.group(axis, rank)) == tuple(ranks))

    def groups(self, axis: str) -> Iterator[range]:
        """All groups of an axis."""
        return (group for rank in range(self.world) if (group := self.group(axis, rank))[0] == rank)


def mismatch(classes: Sequence[ExecutedClass], layout: RankLayout) -> str | None:
    """The first collective in which ranks of a group do not match: in kind, in size, in the rows of an all-to-all, or
    because one of them has fewer. None: in every group of all ranks they match, in order."""
    class_of = [0] * layout.world
    for number, one in enumerate(classes):
        for rank in one.ranks:
            class_of[rank] = number
    for axis in AXES[1:]:
        of_classes = [[message for message in one.messages if message.axis == axis] for one in classes]
        checked = set()
        for group in layout.groups(axis):
            numbers = tuple(class_of[rank] for rank in group)
            if numbers in checked:
                continue
            checked.add(numbers)
            for place, messages in enumerate(zip_longest(*(of_classes[number] for number in set(numbers)))):
                of_class = dict(zip(set(numbers), messages, strict=True))
                if pair := _unequal([of_class[number] for number in numbers]):
                    first, second = (f"{of_class[numbers[i]] or 'missing'} on rank {group[i]}" for i in pair)
                    return f"{axis} group of ranks {rank_numbers(group)}: collective {place + 1} is {first}, {second}"
    return None


def _unequal(messages: Sequence[Message | None]) -> tuple[int, int] | None:
    """Two places in a group whose messages do not match."""
    first = messages[0]
    for place, other in enumerate(messages):
        if first is None or other is None or (first.kind, first.rows is None) != (other.kind, other.rows is None):
            if first != other:
                return 0, place
        elif first.rows is None and first.bytes != other.bytes:
            return 0, place
    rows = [message.rows for message in messages if message and message.rows]
    if not rows or (len({*rows}) == 1 and rows[0][0] == rows[0][1] and len({*rows[0][0]}) == 1):
        return None
    # Rows for rank s of rank r are those from rank r of rank s.
    sent_RR, received_RR = (np.array([of_rank[i] for of_rank in rows]) for i in (0, 1))
    different = np.argwhere(sent_RR != received_RR.T)
    return (int(different[0][0]), int(different[0][1])) if len(different) else None


class Comparison(NamedTuple):
    """Messages of one kind in groups of one shape, in bytes of a rank, on average over all ranks."""

    kind: str
    ranks: int
    stride: int
    planned: float
    executed: float

    @property
    def is_equal(self) -> bool:
        return math.isclose(self.planned, self.executed, rel_tol=1e-12)


def beside_plan(config: PlanConfig, classes: Sequence[ExecutedClass], layout: RankLayout) -> list[Comparison]:
    """Planned and executed bytes, without messages of at most `FEW_NUMBERS_BYTES`."""
    executed, planned = Counter[tuple[str, int, int]](), Counter[tuple[str, int, int]]()
    for one in classes:
        for message in one.messages:
            if message.axis != "rank" and (message.bytes > FEW_NUMBERS_BYTES or message.rows):
                group = layout.group(message.axis, 0)
                executed[message.kind, len(group), group.step] += message.bytes * len(one.ranks)
    for one in plan.collectives(config):
        planned[one.kind, one.ranks, one.stride] += one.input_bytes  # pyright: ignore[reportArgumentType]
    return [
        Comparison(*key, planned=planned[key], executed=executed[key] / layout.world)
        for key in sorted({*planned, *executed})
    ]


def in_loops(messages: Sequence[Message]) -> list[tuple[int, tuple[Message, ...]]]:
    """The same sequence as (repetitions, messages): a model's layers repeat theirs."""
    found, start = [], 0
    while start < len(messages):
        count, period = 1, 1
        for length in range(1, _LONGEST_LOOP + 1):
            body, times = messages[start : start + length], 1
            while messages[start + times * length : start + (times + 1) * length] == body:
                times += 1
            if times > 1 and times * length > count * period:
                count, period = times, length
        found.append((count, tuple(messages[start : start + period])))
        start += count * period
    return found


KINDS = {
    "all-gather": {"all_gather_into_tensor", "c10d._allgather_base_"},
    "reduce-scatter": {"reduce_scatter_tensor", "c10d._reduce_scatter_base_"},
    "all-reduce": {"all_reduce", "c10d.allreduce_"},
    "all-to-all": {"all_to_all_single"},
}
"""Names of torch and its dispatcher, by the plan's names."""
CPU = torch.device("cpu")


def require_executable(config: PlanConfig) -> None:
    """Raises ConfigError for settings that are not executed."""
    parallel = config.parallel
    obstacles = {
        "parallel.zero_stage 3 (DeepSpeed compares numbers of all ranks): set stage 0, 1 or 2": parallel.zero_stage
        == 3,
        f"parallel.offload {parallel.offload!r}: set none": parallel.offload != "none",
        "train.compile: set train.compile = false": config.train.compile,
    }
    for obstacle, is_met in obstacles.items():
        if is_met:
            raise ConfigError(f"plan.execute does not support {obstacle}")


def execute(config: PlanConfig, corpora: Corpora, log: Callable[[str], None]) -> list[ExecutedClass]:
    """The classes of all ranks, with what their first ranks send and hold in a training step.

    Args:
        config: with `run.device` cpu and a number for memory.tile_tokens.
        log: is called with a line before each rank runs.

    Raises:
        ConfigError: as `require_executable` and `build_batches`.
        DataError: the ranks together do not read each token of the batch exactly once.
    """
    require_executable(config)
    layout = layout_of(config)
    batches = build_batches(config, corpora, mesh_of(layout, 0), tiling_of(config, mesh_of(layout, 0)))
    shapes = dict(read_all(config, batches, layout))
    of_rank = [shapes[layout.coordinates(rank)[1:]] for rank in range(layout.world)]

    def run(rank: int) -> tuple[tuple[Message, ...], dict[str, int]]:
        return execute_rank(config, layout, rank, batches.of_shard(batch_shard(config, layout, rank))[0])

    log("rank 0")
    messages, peak = run(0)
    # In an all-to-all of statistics, ranks scan different numbers of columns: those vectors of `rows` that are unequal.
    columns = sorted({rows for message in messages for rows in message.rows or () if len({*rows}) > 1})
    # States that are passed on go from each sequence rank to another one.
    passes = any(facts.passed_on_bytes(load_of(config)) for facts in facts_of(config.model.pattern))
    keys: dict[Hashable, list[int]] = {}
    for rank, shape in enumerate(of_rank):
        place = layout.coordinates(rank)[1]
        scanned = tuple(rows[place] for rows in columns)
        keys.setdefault((shape, scanned, place if passes else None), []).append(rank)
    classes = []
    for number, ranks in enumerate(keys.values()):
        if ranks[0]:
            log(f"rank {ranks[0]}, class {number + 1} of {len(keys)}")
            messages, peak = run(ranks[0])
        classes.append(ExecutedClass(tuple(ranks), messages, peak))
    return classes


def layout_of(config: PlanConfig) -> RankLayout:
    return RankLayout(config.parallel.tensor, config.parallel.sequence, config.cluster.ranks)


def execute_rank(
    config: PlanConfig, layout: RankLayout, number: int, batch: Batch
) -> tuple[tuple[Message, ...], dict[str, int]]:
    """The collectives of this rank in a training step on its batch, in order, and its live bytes at their peak, by use.

    The step before has one token on each rank: the optimizer has its state then.
    """
    with fake_world(number, layout.world) as world:
        mesh = build_mesh(world, config.parallel, hosts=["one"] * layout.world)
        with FakeRank() as rank:
            engine = build_training_engine(config, mesh)
            token = torch.zeros(1, 1, dtype=torch.int64)
            first = [MicroBatch(token, token)] * config.accumulation(layout.world)
            train_step(engine, first, tile(mesh, mesh.sequence.size), config.optim.lr)
            rank.label("optimizer", (x for _, x in own_state(engine)))  # at stage 0 also the weights
            rank.label("weights", engine.module.parameters())
            rank.label("gradients", summed_gradients(engine))
            for parameter in engine.module.parameters():
                parameter.register_hook(lambda gradient: rank.label("gradients", [gradient]))
            todo = micro_batches(batch, CPU)
            rank.restart()
            train_step(engine, todo, tiling_of(config, mesh), config.optim.lr)
        groups = {name: ranks_of_group(name) for name in {sent.group for sent in rank.sent}}
    messages = (_message(one, layout.axis_of(groups[one.group], number)) for one in rank.sent)
    return tuple(messages), {str(kind): size for kind, size in rank.peak.items()}


def read_all(
    config: PlanConfig, batches: TrainingBatches, layout: RankLayout
) -> Iterator[tuple[tuple[int, int], Hashable]]:
    """((sequence rank, data rank), what determines the shapes of its tensors) for all ranks.

    Raises:
        DataError: the ranks together do not read each token of the batch exactly once.
    """
    ranks = range(0, layout.world, layout.tensor)
    whole = batches.of_shard(BatchShard(0, 1, ((0, config.row_tokens),)))[0]
    times_ABT, micro_batch_count = np.zeros(whole.tokens.shape, np.uint8), config.accumulation(layout.world)
    for rank in ranks:
        shard = batch_shard(config, layout, rank)
        batch = batches.of_shard(shard)[0]
        rows = slice(shard.data_rank * micro_batch_count, (shard.data_rank + 1) * micro_batch_count)
        here = np.concatenate([np.arange(*columns) for columns in shard.columns])
        times_ABT[rows, :, here] += 1
        for name in ("tokens", "labels"):
            if not np.array_equal(getattr(batch, name), getattr(whole, name)[rows][..., here]):
                raise DataError(f"plan.execute: rank {rank} reads other {name} than those of its place in the batch")
        tiles = tiling_of(config, mesh_of(layout, rank)).tiles
        yield layout.coordinates(rank)[1:], tuple(_shapes(config, batch, tiles))
    if (wrong := np.flatnonzero(times_ABT != 1)).size:
        place = [int(i) for i in np.unravel_index(wrong[0], times_ABT.shape)]
        raise DataError(
            f"plan.execute: {wrong.size:,} tokens of the batch are not read exactly once, the first of them "
            f"{times_ABT.flat[wrong[0]]} times: [micro-batch, row, column] {place}"
        )


def batch_shard(config: PlanConfig, layout: RankLayout, rank: int) -> BatchShard:
    """The tokens that a rank reads."""
    mesh = mesh_of(layout, rank)
    return BatchShard(mesh.data.rank, mesh.data.size, tuple(tile.columns for tile in tiling_of(config, mesh).tiles))


def mesh_of(layout: RankLayout, rank: int) -> Mesh:
    """The axes of a rank, without process groups."""
    tensor, sequence, data = layout.coordinates(rank)
    return Mesh(
        tensor=Axis(tensor, layout.tensor, None),
        sequence=Axis(sequence, layout.sequence, None),
        data=Axis(data, layout.data, None),
        replicas=Axis(rank // layout.tensor, layout.world // layout.tensor, None),
        device=CPU,
        node=Axis(rank, layout.world, None),
    )


def _shapes(config: PlanConfig, batch: Batch, tiles: tuple[Tile, ...]) -> Iterator[Hashable]:
    model, tensor = config.model, config.parallel.tensor
    heads = model.heads // tensor
    mixers = [mixer_class(letter) for letter in sorted(set(model.pattern))]
    for micro_batch in micro_batches(batch, CPU):
        for one in tile_batches(micro_batch.tokens, micro_batch.labels, micro_batch.cu_seqlens, 1.0, tiles):
            B, L = one.tokens_BL.shape
            local = LocalDocuments.of(one.cu_seqlens, B, L, one.shard.split if one.shard else None)
            keys = tuple(mixer.shape_key(model, heads, local) for mixer in mixers)
            yield B, L, len(local.lengths), len(local.whole_lengths), keys


def _message(sent: Sent, axis: str) -> Message:
    kind = next((kind for kind, names in KINDS.items() if sent.kind in names), sent.kind)
    return Message(kind, axis, sent.bytes, sent.rows)
