"""Execution of a plan: the training step of one rank of each class, on fake tensors.

Ranks are in one class if all their tensors have equal shapes: those with slices of equal length, with equal numbers of
documents and of the operators' chunks in each tile, and with columns to scan for other ranks in the same exchanges. In
an A layer also the lengths of documents and of what they attend to are equal. The lengths of documents may differ
otherwise, and the tensors that a partition of ZeRO consists of.

Everything of the step runs: the loader, the model, its parallel layers, and at ZeRO stages 0 to 2 DeepSpeed.
"""

from collections.abc import Callable, Hashable, Iterator

import numpy as np
import torch

from tost_lm.data.loader import Batch, BatchShard, Corpora, TrainingBatches
from tost_lm.data.prefetch import MicroBatch, micro_batches
from tost_lm.errors import ConfigError, DataError
from tost_lm.ops.chunked import chunk_tokens
from tost_lm.ops.sequence_shard import LocalDocuments
from tost_lm.parallel.fake_rank import FakeRank, fake_world, ranks_of_group
from tost_lm.parallel.mesh import Axis, Mesh, build_mesh
from tost_lm.parallel.zero import own_state, summed_gradients
from tost_lm.sizes import SLOT_CHUNK_TOKENS
from tost_lm.testing.traffic import Sent
from tost_lm.training.executed import ExecutedClass, Message, RankLayout
from tost_lm.training.loop import build_training_engine
from tost_lm.training.memory import tiling_of
from tost_lm.training.plan_config import PlanConfig
from tost_lm.training.step import build_batches, train_step
from tost_lm.training.tiled import Tile, tile, tile_batches

KINDS = {
    "all-gather": {"all_gather_into_tensor", "c10d._allgather_base_"},
    "reduce-scatter": {"reduce_scatter_tensor", "c10d._reduce_scatter_base_"},
    "all-reduce": {"all_reduce", "c10d.allreduce_"},
    "all-to-all": {"all_to_all_single"},
}
"""As the plan and as the dispatcher name them."""
CPU = torch.device("cpu")


def require_executable(config: PlanConfig) -> None:
    """Raises ConfigError for settings that are not executed."""
    parallel = config.parallel
    obstacles = {
        "parallel.zero_stage 3 (DeepSpeed compares numbers of all ranks): set stage 0, 1 or 2": parallel.zero_stage
        == 3,
        f"parallel.offload {parallel.offload!r}: set none": parallel.offload != "none",
        "train.compile: set train.compile = false": config.train.compile,
        f"the G layers of model.pattern {config.model.pattern!r}: use T, S and A layers": "G" in config.model.pattern,
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
    keys: dict[Hashable, list[int]] = {}
    for rank, shape in enumerate(of_rank):
        place = layout.coordinates(rank)[1]
        keys.setdefault((shape, tuple(rows[place] for rows in columns)), []).append(rank)
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
    """What a rank reads."""
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
    chunks = {"T": chunk_tokens(heads, model.width // model.heads, CPU), "S": SLOT_CHUNK_TOKENS}
    sizes = [tokens for letter, tokens in chunks.items() if letter in model.pattern]
    for micro_batch in micro_batches(batch, CPU):
        for one in tile_batches(micro_batch.tokens, micro_batch.labels, micro_batch.cu_seqlens, 1.0, tiles):
            B, L = one.tokens_BL.shape
            local = LocalDocuments.of(one.cu_seqlens, B, L, one.shard.split if one.shard else None)
            counts = tuple(sum(-(-length // size) for length in local.lengths) for size in sizes)
            before = min(local.before[0], model.window or local.before[0])
            attended = (local.lengths, before) if "A" in model.pattern else ()
            yield B, L, len(local.lengths), len(local.whole_lengths), counts, attended


def _message(sent: Sent, axis: str) -> Message:
    kind = next((kind for kind, names in KINDS.items() if sent.kind in names), sent.kind)
    return Message(kind, axis, sent.bytes, sent.rows)
