"""Memory of a rank during training, planned from the settings alone.

The plan has five moments of a step, one of which has the peak. The symbols of the formulas:

    n  parameters on a tensor rank: an equal fraction of embedding, mixers and MLPs, and all positions and scales
    R  replicas: data ranks × sequence ranks
    s  sequence ranks
    t  tensor ranks
    e  bytes of an element: 2 in bfloat16, 4 in float32
    C  channels, H heads, V vocabulary size

**Weights** take e·n. ZeRO stage 3 has a partition of them, and at most 10⁹ gathered parameters.

**Optimizer** state takes 12·n/R: the float32 copy of the weights that DeepSpeed makes, even in float32, and AdamW's two
moments. Stage 0, which one replica in float32 always runs, has no copy and takes 8·n. Other
optimizers keep what their modules in `tost_lm/optim` state.

**Activations** are described in `activations.py`.

`memory.tile_tokens`: activations and loss count the tokens of one tile. In addition there are the sums of gradients
over tiles, 4·n, the row's tokens and labels, 16 bytes per token, and a state of each mixer for each tile
(`tost_lm/mixers/*/spec.py`).

**Loss**: the logits of a tile and their gradient take at most 2³⁰ bytes. On a CPU they take at most 2²⁸ bytes, in
float32 and, with bfloat16 weights, also in bfloat16. The tile also takes e·C per token. The forward computes the
gradient of the head's weight, 4·V·C/t. With bfloat16, that of a tile, 2·V·C/t, exists beside the gradient of its
logits. The head's input and its gradient take 2·e·C per token for any t. The weight's gradient exists until the
embedding's gradient is added to it; a head that is not tied keeps it.

**Gradients and buffers** depend on the ZeRO stage (`_gradients`). DeepSpeed fills buckets of at most 4·10⁷ gradients,
or of the largest tensor, and sends a copy of each during the backward. Stage 0, and stage 1 in bfloat16, send copies of
up to 5·10⁸ gradients after it. Stage 1 in bfloat16 has all gradients of a micro-batch, e·n, until they are added to
their sums; up to 2²⁴ are cast at once for that, and for the norm. A GPU allocates whole buckets; a CPU only has the
memory that is written.

Not planned: the device context, libraries and NCCL (`cluster.reserved_gb`), fragmentation by the allocator, and the
host copy of an asynchronous checkpoint.
"""

import math
from itertools import accumulate
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
    tokens_in_memory,
)
from tost_lm.pretrain.settings import PretrainConfig
from tost_lm.sizes import CAST_ELEMENTS, DEVICE_LOGITS_BYTES, LOGITS_BYTES, bucket_elements

REDUCED_AT_END = 500_000_000  # elements: DeepSpeed's buffer where no gradient is reduced before the end of the backward
GATHERED = 1_000_000_000  # elements: its stage3_max_live_parameters

SMALLEST_TILE = 1024  # tokens
AnyPretrainConfig = TypeVar("AnyPretrainConfig", bound=PretrainConfig)

LOSS, START, END = "at the loss", "at the start of the blocks' backward", "at the end of the backward"
MOMENTS = (LOSS, START, END, "at the gradient reduction", "at the update")


class Moment(NamedTuple):
    """Bytes of a rank at one moment of a step, by use."""

    name: str
    weights: float
    optimizer: float
    gradients: float
    activations: float
    loss: float
    buffers: float

    @property
    def total(self) -> float:
        return sum(self[1:])


def moments(config: PretrainConfig, ranks: int, *, whole_buckets: bool | None = None) -> list[Moment]:
    """The moments that may have the peak, in order of time, on a GPU unless `run.device` is cpu.

    Args:
        whole_buckets: count DeepSpeed's buckets as they are allocated; None: not on a CPU, which has only the memory
            that is written.

    Raises:
        ConfigError: the batch is not divisible by the ranks.
    """
    tokens, model, tensor = tokens_in_memory(config), config.model, config.parallel.tensor
    weights, optimizer = weights_and_optimizer(config, ranks)
    if config.parallel.offload != "none":
        optimizer = 0.0
    kept, blocks, e = (
        activation_bytes_per_token(config) * tokens,
        block_bytes(config),
        ELEMENT_BYTES[config.train.dtype],
    )
    # The backward begins with the last block. What it has passed is freed.
    freed = accumulate((block.kept for block in reversed(blocks)), initial=0.0)
    in_backward = max(block.in_backward - size for block, size in zip(reversed(blocks), freed, strict=False))
    first = blocks[0].kept + blocks[0].in_backward
    gathered = e * tokens * model.width if tensor > 1 else 0.0
    head_gradient = e * model.vocab_size * model.width / tensor
    tiled = config.tile_tokens < config.row_tokens
    between_tiles = tile_states_bytes(config) + 16 * micro_batch_tokens(config) if tiled else 0.0
    activations_and_loss = {
        LOSS: (kept + between_tiles, loss_bytes(config)),
        START: (kept + in_backward + between_tiles, head_gradient),
        # Activations of the first block, before the gradient of the embedding. With tiles they are freed by now.
        END: (0.0 if tiled else max(0.0, first - head_gradient), 0.0),
    }
    sums = {LOSS: 4 * parameters_per_rank(config), START: 4 * parameters_per_rank(config)} if tiled else {}
    return [
        Moment(
            name, weights, optimizer, gradients + sums.get(name, 0.0),
            *activations_and_loss.get(name, (0.0, 0.0)), buffers + gathered,
        )
        for name, (gradients, buffers) in _gradients(config, ranks, whole_buckets).items()
    ]  # fmt: skip


def peak_moment(config: PretrainConfig, ranks: int, *, whole_buckets: bool | None = None) -> Moment:
    """The moment with the peak memory; arguments as `moments`."""
    return max(moments(config, ranks, whole_buckets=whole_buckets), key=lambda moment: moment.total)


def largest_tile(config: AnyPretrainConfig, ranks: int, limit: float) -> AnyPretrainConfig:
    """The configuration with the largest tile, a power of two or the row, whose planned peak is at most `limit` bytes.

    Raises:
        ConfigError: no tile fits.
    """
    sizes = [size for power in range(30) if (size := SMALLEST_TILE << power) < config.row_tokens]
    needed = 0.0
    for size in [config.row_tokens, *reversed(sizes)]:
        memory = config.memory.model_copy(update={"tile_tokens": size})
        tiled = config.model_copy(update={"memory": memory})
        if (needed := peak_moment(tiled, ranks).total) <= limit:
            return tiled
    raise ConfigError(
        f"memory.tile_tokens auto: the plan of tiles of {min(config.row_tokens, SMALLEST_TILE)} tokens needs "
        f"{needed / 1e9:.1f} GB per rank, and {limit / 1e9:.1f} GB are usable; increase parallelism (parallel.tensor, "
        "parallel.zero_stage) or set a number"
    )


def parameters_per_rank(config: PretrainConfig) -> float:
    """Parameters on a tensor rank, n in the formulas."""
    counts = parameters(config.model)
    return counts.positions + counts.scales + (counts.embedding + counts.mixers + counts.mlps) / config.parallel.tensor


def tile_states_bytes(config: PretrainConfig) -> float:
    """Bytes of the states between tiles on the device. States that grow with the length have gradients in float32."""
    if config.memory.offload_tile_states:
        return 0.0
    states, e = 0.0, ELEMENT_BYTES[config.train.dtype]
    for spec, shape in config.model.mixers:
        with_gradients = 1 + 4 / e if spec.kept_tokens(shape) is None else 1
        states += config.model.letters.count(spec.letter) * costs_of(config, spec).state * with_gradients
    rows = config.train.micro_batch_size * config.train.seq_len / config.row_tokens
    return math.ceil(config.row_tokens / config.tile_tokens) * states / config.parallel.tensor * rows


def zero_stage_of(config: PretrainConfig, ranks: int) -> int:
    """The ZeRO stage that runs."""
    replicas = ranks // config.parallel.tensor
    return config.parallel.partitioning_stage(replicas)


def reduced_at_once(config: PretrainConfig, stage: int) -> float:
    """Gradients that are reduced at once, at most."""
    n, model = parameters_per_rank(config), config.model
    if reduces_at_end(config, stage):
        return min(n, REDUCED_AT_END)
    tables = parameters(model).positions, model.vocab_size * model.width / config.parallel.tensor
    return bucket_elements(n, max(tables))


def reduces_at_end(config: PretrainConfig, stage: int) -> bool:
    """Whether DeepSpeed reduces gradients after the last backward, not during it."""
    return stage == 0 or (stage == 1 and config.train.dtype == "bfloat16")


def weights_and_optimizer(config: PretrainConfig, ranks: int) -> tuple[float, float]:
    """Bytes of weights and optimizer state of a rank, on the device or offloaded."""
    n, stage, e = parameters_per_rank(config), zero_stage_of(config, ranks), ELEMENT_BYTES[config.train.dtype]
    fraction, state = config.parallel.tensor / ranks, state_bytes(config, n, config.parallel.tensor)
    if stage == 0:
        return e * n, state
    own = (4 * n + state) * fraction
    if stage < 3:
        return e * n, own
    return e * min(n, GATHERED) + (0.0 if config.parallel.offload == "all" else e * n * fraction), own


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
    in_budget /= logit_bytes * config.model.vocab_size
    return LogitTiles(logit_bytes, math.ceil(micro_batch_tokens(config) / in_budget), min(tokens, in_budget))


def loss_bytes(config: PretrainConfig) -> float:
    """Bytes of logits, their gradients and the head's gradients in the forward."""
    C, e, tokens = config.model.width, ELEMENT_BYTES[config.train.dtype], tokens_in_memory(config)
    vocabulary, tiles = config.model.vocab_size / config.parallel.tensor, logit_tiles(config)
    logits = tiles.logit_bytes * tiles.tokens
    if e < 4:  # then only the gradient of the logits is left, and in e bytes that of the weight
        logits = max(logits, e * (tiles.tokens + C))
    return vocabulary * (logits + 4 * C) + e * C * tiles.tokens + 2 * e * C * tokens


def _gradients(config: PretrainConfig, ranks: int, whole_buckets: bool | None) -> dict[str, tuple[float, float]]:
    """Bytes of gradients and buffers by moment (DeepSpeed 0.19, runtime/zero/stage_1_and_2.py and stage3.py)."""
    parallel, n, e = config.parallel, parameters_per_rank(config), ELEMENT_BYTES[config.train.dtype]
    tensor, stage = parallel.tensor, zero_stage_of(config, ranks)
    partition, one_replica = n * tensor / ranks, ranks == tensor
    only_written = config.run.device == "cpu" if whole_buckets is None else not whole_buckets
    accumulates = config.accumulation(ranks) > 1
    filled = reduced_at_once(config, stage)
    # Stages 1 and 2 fill one bucket while the other is reduced. A CPU has only the memory that is written.
    two_buckets = min(n, 2 * filled) if only_written else 2 * filled
    bucket = 4 * filled if stage == 3 else (e if stage == 2 else 4) * two_buckets
    empty_bucket = 0.0 if only_written else bucket
    # The gradients of head and embedding of one weight, or the last and its sum so far.
    has_two = config.model.tied_head or accumulates
    table = e * config.model.vocab_size * config.model.width / tensor if has_two else 0.0

    if stage == 0:
        summed = 4 * n if accumulates else 0.0
        steps = [(summed, 0), (summed, 0), (4 * n, table), (4 * n, 0 if one_replica else 4 * filled), (4 * n, 0)]
    elif stage == 1 and e == 2:
        cast, copy = min(n, CAST_ELEMENTS), 0 if one_replica else 4 * filled
        added = max(table, 4 * cast if accumulates else 0.0)
        # At the update, squares are added up in float64.
        steps = [(4 * n, 0), (4 * n, 0), ((4 + e) * n, added), (4 * n, copy), (4 * n, max(copy, 8 * cast))]
    elif stage == 1:
        summed = 4 * n if accumulates else 0.0
        steps = [
            (summed, empty_bucket if accumulates else 0), (summed, empty_bucket), (4 * n, table + empty_bucket),
            # At the update, a copy of the partition's gradients.
            (4 * partition, bucket + 4 * filled), (4 * partition, 4 * partition),
        ]  # fmt: skip
    elif stage == 2:
        summed = 4 * partition if accumulates else 0.0
        copy = 6 * filled if e == 2 else (0 if one_replica else 4 * filled)
        reduced = summed + 4 * partition if e == 4 else 4 * partition
        steps = [
            (summed, 0), (summed, empty_bucket), (summed, bucket + table), (reduced, bucket + copy),
            (4 * partition, 4 * partition if e == 4 else 0),
        ]  # fmt: skip
    else:
        empty_bucket = bucket  # always allocated
        steps = [
            (4 * partition, bucket), (4 * partition, bucket), (4 * partition + e * filled, bucket + table),
            (4 * partition + e * filled, bucket + 4 * filled), (4 * partition, bucket + 4 * partition),
        ]  # fmt: skip
    if parallel.offload != "none":
        steps[-1] = (0.0, empty_bucket)  # the host does the update
    return dict(zip(MOMENTS, steps, strict=True))


def state_bytes(config: PretrainConfig, n: float, tensor: int = 1) -> float:
    """Bytes of the optimizer's state of the `n` parameters of one of `tensor` ranks."""
    in_matrices = sum(rows * columns for rows, columns in block_matrices(config.model)) / tensor
    return optimizer_of(config.optim).state_bytes(n, in_matrices)


def checkpoint_bytes(config: PretrainConfig) -> float:
    """Bytes of a checkpoint, and of its copy in host memory: float32 weights and optimizer state."""
    n = parameters(config.model).total
    return 4 * n + state_bytes(config, n)
