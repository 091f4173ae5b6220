"""Memory of a rank during training, planned from the settings alone.

The plan has five moments of a step, one of which has the peak. The symbols of the formulas:

    n  parameters on a tensor rank: a fraction of embedding, mixers and MLPs, and all positions and scales
    R  ranks that shard: data ranks × sequence ranks, or `parallel.shard_ranks`
    s  sequence ranks
    t  tensor ranks
    e  bytes of an element: 2 in bfloat16, 4 in float32
    C  channels, H heads, V vocabulary size

**Weights**: a rank keeps 4·n/R in float32. It gathers e·n more, at stages 1 and 2 from the first forward of a step to
its last backward, at stage 3 of the buckets in use (`groups.py`). At stage 0, or with one replica, it keeps 4·n, and in
bfloat16 2·n more.

**Optimizer** state is divided like the weights: AdamW's two moments, 8·n/R, or what other optimizers state in
`tost_lm/optim`.

**Activations** are described in `activations.py`.

`memory.tile_tokens`: activations and loss count the tokens of one tile. In addition there are the row's
tokens and labels, 16 bytes per token, and a state of each mixer for each tile (`tost_lm/mixers/*/spec.py`).

**Loss**: the logits of a tile and their gradient take at most 2³⁰ bytes. On a CPU they take at most 2²⁸ bytes, in
float32 and, with bfloat16 weights, also in bfloat16. The tile also takes e·C per token. The forward computes the
gradient of the head's weight, 4·V·C/t. With bfloat16, that of a tile, 2·V·C/t, exists beside the gradient of its
logits. The head's input and its gradient take 2·e·C per token for any t. The weight's gradient exists until the
embedding's gradient is added to it; without a tied head until the update, at stage 3 until its reduction.

**Gradients** of a bucket take e per number in its backward, and 4 in the buffer of their reduction, which exists until
the next reduction; reduced ones take 4·n/R. At stages 0 and 1 and with one replica, those of several micro-batches or
tiles are summed whole, in float32, before. A gather has two copies of its bucket, and in the backward the next bucket
is gathered ahead. The norm casts up to 2²⁴ gradients to float64 at once.

Not planned: the device context, libraries and NCCL (`cluster.reserved_gb`), fragmentation by the allocator, and the
host copy of an asynchronous checkpoint.
"""

import math
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

from tost_lm.errors import ConfigError
from tost_lm.model.flops import block_matrices, parameters
from tost_lm.optim.interface import optimizer_of
from tost_lm.pretrain.plan.activations import (
    ELEMENT_BYTES,
    activation_bytes_per_token,
    block_bytes,
    costs_of,
    micro_batch_tokens,
    tiles,
    tokens_in_memory,
)
from tost_lm.pretrain.plan.groups import NO_GROUP, groups_of, shards, stage_of, sum_of
from tost_lm.pretrain.settings import PretrainConfig
from tost_lm.sizes import BUCKET_ELEMENTS, CAST_ELEMENTS, DEVICE_LOGITS_BYTES, LOGITS_BYTES

SMALLEST_TILE = 1024  # tokens
USABLE = 0.8
"""Fraction of a rank's free memory that tiles may fill; the plan does not count all memory."""
AnyPretrainConfig = TypeVar("AnyPretrainConfig", bound=PretrainConfig)

LOSS, START, END = "at the loss", "at the start of a backward", "at the end of a backward"
REDUCTION, UPDATE = "at the gradient reduction", "at the update"


class Moment(NamedTuple):
    """Bytes of a rank at one moment of a step, by use."""

    name: str
    weights: float
    optimizer: float
    gradients: float
    activations: float
    loss: float
    buffers: float = 0.0

    @property
    def total(self) -> float:
        return sum(self[1:])


def moments(config: PretrainConfig, ranks: int) -> list[Moment]:
    """The moments that may have the peak, in order of time, on a GPU unless `run.device` is cpu.

    Raises:
        ConfigError: the batch is not divisible by the ranks.
    """
    found = _of_shards(config, ranks) if stage_of(config, ranks) else _of_copies(config, ranks)
    exchanged = 0.0
    if config.parallel.tensor > 1:
        exchanged = ELEMENT_BYTES[config.train.dtype] * tokens_in_memory(config) * config.model.width
    return [moment._replace(buffers=moment.buffers + exchanged) for moment in found]


def _of_copies(config: PretrainConfig, ranks: int) -> Iterator[Moment]:
    """Each rank has all weights, gradients and optimizer state."""
    n, e, kept = groups_of(config, ranks).total.numbers, ELEMENT_BYTES[config.train.dtype], _activations(config)
    sums = 4 * n if _has_several_backwards(config, ranks) else 0

    def at(name: str, *others: float) -> Moment:
        return Moment(name, *weights_and_optimizer(config, ranks), *others)

    yield at(LOSS, sums, kept.at_loss, loss_bytes(config))
    yield at(START, sums, max(kept.during), kept.table)
    in_sums = sums and e == 4
    # The gradients of head and embedding of one weight, or the last and its sum so far.
    added = kept.table if config.model.tied_head or in_sums else 0.0
    yield at(END, sums if in_sums else sums + e * n, max(kept.before[0], kept.during[0] - added), 0.0, added)
    bucket = min(n, max(BUCKET_ELEMENTS, kept.table / e)) if ranks > config.parallel.tensor else 0
    yield at(REDUCTION, 4 * n, 0.0, 0.0, 8 * bucket)
    yield at(UPDATE, 4 * n, 0.0, 0.0, 8 * min(n, CAST_ELEMENTS))


def _of_shards(config: PretrainConfig, ranks: int) -> Iterator[Moment]:
    """Weights, gradients and optimizer state are sharded. The backward computes and reduces one group after another."""
    groups, e, stage = groups_of(config, ranks), ELEMENT_BYTES[config.train.dtype], config.parallel.zero_stage
    weights, optimizer = weights_and_optimizer(config, ranks)
    padded = groups.total.padded
    reduced = 4 * padded / shards(config, ranks)
    if config.parallel.offload != "none":
        weights = optimizer = reduced = 0.0
    kept, several = _activations(config), _has_several_backwards(config, ranks)
    sums = 4 * padded if several and stage == 1 else 0
    in_sums = sums and e == 4
    whole = e * (groups.root.padded if stage == 3 else padded)

    def at(name: str, gathered: float, *others: float) -> Moment:
        return Moment(name, weights + gathered, optimizer, *others)

    gradients = sums or (reduced if several else 0.0)
    order = [groups.head, *reversed(groups.buckets), sum_of([groups.root, groups.embedding])]
    order = [group for group in order if group.numbers]
    # A forward keeps the buffer of its last gather; at stages 1 and 2 only the first forward of a step gathers.
    buffer = e * order[0].padded
    if stage < 3:
        buffer = 0.0 if tiles(config) > 1 else max(0.0, buffer - gradients)
    yield at(LOSS, whole + e * groups.head.padded, gradients, kept.at_loss, loss_bytes(config), buffer)
    gathers = [*order[:-1], NO_GROUP, NO_GROUP] if stage == 3 else [NO_GROUP] * (len(order) + 1)
    passed, end, sent, of_head = 0, config.model.layers, 0, 0.0 if groups.head.numbers else kept.table
    for group, (own, ahead) in zip(order, pairwise(gathers), strict=True):
        start, is_last, prefetched = end - group.blocks, group is order[-1], e * ahead.padded
        here = reduced * passed / padded
        gradients = sums - 4 * passed + here if sums else max(gradients, here)
        if group.blocks:
            during = max(kept.during[start:end])
            gathering = max(prefetched, e * own.padded)  # for a moment there are two copies
            yield at(START, whole + e * own.padded, gradients, during, of_head, gathering + sent)
        of_head = 0.0 if is_last else of_head
        new = 0 if in_sums else e * group.numbers
        added = kept.table if is_last and (config.model.tied_head or in_sums) else 0.0
        during = max(kept.before[start], (kept.during[start] if group.blocks else 0.0) - added)
        yield at(END, whole + e * own.padded, gradients + new, during, of_head, prefetched + sent + added)
        whole -= e * group.padded if stage == 1 or (stage == 2 and not several) else 0
        sent = 4 * group.padded
        unreduced = 0 if sums else new
        yield at(REDUCTION, whole, gradients + unreduced, kept.before[start], of_head, prefetched + sent)
        passed, end = passed + group.padded, start
    yield at(UPDATE, 0.0, reduced, 0.0, 0.0, 8 * min(padded / shards(config, ranks), CAST_ELEMENTS))


class _Activations(NamedTuple):
    """Bytes of a micro-batch, or of a tile with the states between tiles."""

    at_loss: float
    during: list[float]
    """While the backward of each block computes."""
    before: list[float]
    """Of all blocks before each one, and after the last one."""
    table: float
    """The gradient of the embedding or the head."""


def _activations(config: PretrainConfig) -> _Activations:
    between_tiles = 0.0
    if tiles(config) > 1:
        on_device = 0.0 if config.memory.offload_tile_states else tile_states_bytes(config)
        between_tiles = on_device + 16 * micro_batch_tokens(config)
    blocks, kept = block_bytes(config), between_tiles + activation_bytes_per_token(config) * tokens_in_memory(config)
    before = [*accumulate((block.kept for block in blocks), initial=between_tiles)]
    before[-1] = kept
    during = [after + block.in_backward for after, block in zip(before[1:], blocks, strict=True)]
    table = ELEMENT_BYTES[config.train.dtype] * config.model.vocab_size * config.model.width / config.parallel.tensor
    return _Activations(kept, during, before, table)


def _has_several_backwards(config: PretrainConfig, ranks: int) -> bool:
    """Whether a step has several micro-batches or tiles. Raises as `moments`."""
    return tiles(config) > 1 or config.accumulation(ranks) > 1


def peak_moment(config: PretrainConfig, ranks: int) -> Moment:
    """The moment with the peak memory; arguments as `moments`."""
    return max(moments(config, ranks), key=lambda moment: moment.total)


def largest_tile(config: AnyPretrainConfig, ranks: int, free: float) -> AnyPretrainConfig:
    """The configuration with the largest tile, a power of two or the row, whose planned peak fits the usable fraction
    of `free` bytes.

    Raises:
        ConfigError: no tile fits.
    """
    sizes = [size for power in range(30) if (size := SMALLEST_TILE << power) < config.row_tokens]
    needed, limit = 0.0, USABLE * free
    for size in [config.row_tokens, *reversed(sizes)]:
        memory = config.memory.model_copy(update={"tile_tokens": size})
        tiled = config.model_copy(update={"memory": memory})
        if (needed := peak_moment(tiled, ranks).total) <= limit:
            return tiled
    raise ConfigError(
        f"memory.tile_tokens auto: the plan of tiles of {min(config.row_tokens, SMALLEST_TILE)} tokens needs "
        f"{needed / 1e9:.1f} GB per rank, and {limit / 1e9:.1f} GB are usable; raise parallel.sequence or "
        "parallel.zero_stage, or launch more ranks; tost plan names settings that fit"
    )


def tile_states_bytes(config: PretrainConfig) -> float:
    """Bytes of the states between tiles. States that grow with the length have gradients in float32."""
    with_gradients = 1 + 4 / ELEMENT_BYTES[config.train.dtype]
    return tiles(config) * sum(size * (with_gradients if grows else 1) for grows, size in states_after_tile(config))


def states_after_tile(config: PretrainConfig) -> Iterator[tuple[bool, float]]:
    """Of each mixer, whether its states grow with the length, and the bytes of those of a micro-batch after a tile, or
    that a tile adds to them."""
    rows = config.train.micro_batch_size * config.train.seq_len / config.row_tokens
    for spec, shape in config.model.mixers:
        layers = config.model.letters.count(spec.letter)
        yield spec.kept_tokens(shape) is None, rows * layers * costs_of(config, spec).state / config.parallel.tensor


def weights_and_optimizer(config: PretrainConfig, ranks: int) -> tuple[float, float]:
    """Bytes of weights and optimizer state that a rank has between steps, on the device or offloaded."""
    total, divided = groups_of(config, ranks).total, shards(config, ranks)
    state = state_bytes(config, total.padded, config.parallel.tensor) / divided
    copies = 2 * total.numbers if stage_of(config, ranks) == 0 and config.train.dtype == "bfloat16" else 0
    return 4 * total.padded / divided + copies, state


class LogitTiles(NamedTuple):
    """The portions of tokens whose logits exist at once."""

    logit_bytes: int
    """Size of a logit and its gradient. On a GPU they share memory; on a CPU bfloat16 has a float32 copy."""
    calls: int
    """Portions in a micro-batch."""
    tokens: float
    """Tokens of a portion."""


def logit_tiles(config: PretrainConfig) -> LogitTiles:
    """The portions of the loss on a sequence rank."""
    e, on_cpu, tokens = ELEMENT_BYTES[config.train.dtype], config.run.device == "cpu", tokens_in_memory(config)
    logit_bytes = 4 + e if on_cpu and e < 4 else e
    in_budget = (LOGITS_BYTES if on_cpu else DEVICE_LOGITS_BYTES) * config.parallel.tensor
    in_budget = max(1, in_budget // (logit_bytes * config.model.vocab_size))
    return LogitTiles(logit_bytes, tiles(config) * math.ceil(tokens / in_budget), min(tokens, in_budget))


def loss_bytes(config: PretrainConfig) -> float:
    """Bytes of logits, their gradients and the head's gradients in the forward."""
    C, e, tokens = config.model.width, ELEMENT_BYTES[config.train.dtype], tokens_in_memory(config)
    vocabulary, portion = config.model.vocab_size / config.parallel.tensor, logit_tiles(config)
    logits = portion.logit_bytes * portion.tokens
    if e < 4:  # then only the gradient of the logits is left, and in e bytes that of the weight
        logits = max(logits, e * (portion.tokens + C))
    return vocabulary * (logits + 4 * C) + e * C * portion.tokens + 2 * e * C * tokens


def state_bytes(config: PretrainConfig, n: float, tensor: int = 1) -> float:
    """Bytes of the optimizer's state of the `n` parameters of one of `tensor` ranks."""
    in_matrices = sum(rows * columns for rows, columns in block_matrices(config.model)) / tensor
    return optimizer_of(config.optim).state_bytes(n, in_matrices)


def checkpoint_bytes(config: PretrainConfig) -> float:
    """Bytes of a checkpoint, and of its copy in host memory: float32 weights and optimizer state."""
    n = parameters(config.model).total
    return 4 * n + state_bytes(config, n)
