"""What a rank's memory holds while it trains, from the settings alone.

Told at the moments of a step that may be the fullest. With n numbers trained a tensor rank, R replicas (data × sequence
ranks), t tensor ranks, e bytes an element (2 in bfloat16):

**Weights** e·n; at stage 3 a partition, and up to 10⁹ gathered numbers beside it. **Optimizer** 12·n/R: DeepSpeed's
float32 copy of the weights, in float32 too, and AdamW's two moments; 8·n at stage 0, without a copy.

**Activations**, what autograd keeps for the backward, in units of e·C/t bytes a token: 16 a T layer (the inputs of two
norms 2, of four linears 1 + 1 + 1 + 4, of GELU 4, of two LayerScales 2, and the operator's w 1), 2 less without
LayerScale. An A layer keeps q, k and v in place of w (3; 5 where q and k are turned, since v alone keeps the memory of
all three; k and v of the whole sequence where its tokens lie on several ranks). Besides, in bytes: Π 4·H, sums before
each chunk 4·(2C + H) a chunk, or attention's 4·H; the norms' statistics 16; and e·C in all for the last norm.

With `memory.mlp_tokens` the MLP's branch keeps what goes into it, 1 in place of 12; the rest is there for one portion.
With `memory.recompute = "blocks"` a layer keeps its input, 1, and what it received from other ranks: over s sequence
ranks keys and values, 2·s in an A layer, over tensor ranks 4·t bytes in a T layer. One block is there as a whole while
its backward runs; the gradients on their way through its MLP are 4 more.

With `memory.tile_tokens` all that is of a tile's tokens. Beside it wait the gradients' sums over tiles, 4·n, the row's
tokens and labels, 16 bytes each, and for each tile its state: 4·(2C + H) bytes a T layer, a window of keys and values
an A layer.

**Loss** a portion's logits and their gradient: float32, in bfloat16 beside it too, at most 2²⁸ bytes in all; and e·C a
token of the portion. The gradient of the head's weight, 4·V·C/t, is made in the forward, in bfloat16 beside that of the
portion, 2·V·C/t; with the head's input and its gradient, 2·e·C a token whatever t. The weight's gradient waits for that
of the embedding.

**Gradients and buffers** by stage in `_gradients`: DeepSpeed fills a bucket of 5·10⁸ gradients and copies it to send
it. A GPU has the bucket whole whatever the model, a CPU what is written to. AdamW on a CPU is not fused and needs two
more numbers for each of its own.

Not in it: the device's context, libraries and NCCL (`cluster.reserved_gb`), what is torn by the allocator, and the
asynchronous checkpoint, which lies in host memory.
"""

import math
from typing import NamedTuple, TypeVar

from tost_lm.errors import ConfigError
from tost_lm.model.flops import layers_by_letter, parameters
from tost_lm.training.config import PretrainConfig

BUCKET = 500_000_000  # elements: DeepSpeed's reduce_bucket_size
GATHERED = 1_000_000_000  # elements: its stage3_max_live_parameters
CHUNK_TOKENS_ON_GPU = 32  # tost_lm.ops.triton.tiles
CHUNK_ELEMENTS_ON_CPU = 1 << 19  # tost_lm.ops.chunked
LOGITS_BYTES = 1 << 28  # tost_lm.ops.cross_entropy
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}

SMALLEST_TILE = 1024  # tokens
AnyPretrainConfig = TypeVar("AnyPretrainConfig", bound=PretrainConfig)

LOSS, BLOCKS, END = "at the loss", "as the blocks' backward begins", "as the backward ends"
MOMENTS = (LOSS, BLOCKS, END, "as gradients are sent", "at the update")


class Moment(NamedTuple):
    """Bytes of a rank at one moment of a step, by part."""

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


class Gradients(NamedTuple):
    """Bytes of gradients and of DeepSpeed's buffers."""

    gradients: float
    buffers: float


def moments(config: PretrainConfig, ranks: int) -> list[Moment]:
    """The moments in which a rank may hold most, in order of time; of a GPU unless `run.device` is cpu.

    Raises:
        ConfigError: the ranks or the batch cannot be shared out evenly, or there are G layers.
    """
    tokens, model, tensor = held_here(config), config.model, config.parallel.tensor
    if "G" in model.pattern:
        raise ConfigError(f"model.pattern {model.pattern!r}: memory is planned of T and A layers only")
    weights, optimizer = weights_and_optimizer(config, ranks)
    if config.parallel.offload != "none":
        optimizer = 0.0
    kept, block, e = bytes_a_token(config) * tokens, block_bytes(config), ELEMENT_BYTES[config.train.dtype]
    gathered = e * tokens * model.width if tensor > 1 else 0.0
    waiting = e * model.vocab_size * model.width / tensor
    tiled = config.held_tokens < config.row_tokens
    between_tiles = tile_states_bytes(config) + 16 * tokens_here(config) if tiled else 0.0
    activations_and_loss = {
        LOSS: (kept + between_tiles, loss_bytes(config)),
        BLOCKS: (kept + block.in_backward + between_tiles, waiting),
        # Of the first block; the embedding's gradient comes after it. Tiles are done with by then.
        END: (0.0 if tiled else max(0.0, block.kept + block.in_backward - waiting), 0.0),
    }
    sums = {LOSS: 4 * numbers_here(config), BLOCKS: 4 * numbers_here(config)} if tiled else {}
    return [
        Moment(
            name, weights, optimizer, gradients + sums.get(name, 0.0),
            *activations_and_loss.get(name, (0.0, 0.0)), buffers + gathered,
        )
        for name, (gradients, buffers) in _gradients(config, ranks).items()
    ]  # fmt: skip


def fullest(config: PretrainConfig, ranks: int) -> Moment:
    return max(moments(config, ranks), key=lambda moment: moment.total)


def largest_tile(config: AnyPretrainConfig, ranks: int, room: float) -> AnyPretrainConfig:
    """With the largest tile, a power of two or whole rows, that is planned to need no more than `room` bytes.

    Raises:
        ConfigError: there is none.
    """
    sizes = [size for power in range(30) if (size := SMALLEST_TILE << power) < config.row_tokens]
    needed = 0.0
    for size in [config.row_tokens, *reversed(sizes)]:
        memory = config.memory.model_copy(update={"tile_tokens": size})
        tiled = config.model_copy(update={"memory": memory})
        if (needed := fullest(tiled, ranks).total) <= room:
            return tiled
    raise ConfigError(
        f"memory.tile_tokens auto: even tiles of {min(config.row_tokens, SMALLEST_TILE)} tokens are planned to need "
        f"{needed / 1e9:.1f} GB a rank, and {room / 1e9:.1f} GB may be used: share more out (parallel.tensor, "
        "parallel.zero_stage), or give a number"
    )


def numbers_here(config: PretrainConfig) -> float:
    """Numbers trained by a rank's tensor part of the model."""
    parts = parameters(config.model)
    return parts.positions + parts.scales + (parts.embedding + parts.mixers + parts.mlps) / config.parallel.tensor


def tokens_here(config: PretrainConfig) -> float:
    """Of a micro-batch, on a sequence rank."""
    return config.train.micro_batch_sequences * config.train.sequence_tokens / config.parallel.sequence


def held_here(config: PretrainConfig) -> float:
    """Of these, what is in memory at once: a tile's."""
    return tokens_here(config) * config.held_tokens / config.row_tokens


def tile_states_bytes(config: PretrainConfig) -> float:
    """Of the states that wait between tiles on the device."""
    if config.memory.boundary_states == "host" or config.train.truncate_tokens:
        return 0.0
    model, e = config.model, ELEMENT_BYTES[config.train.dtype]
    layers, rows = layers_by_letter(model), config.train.micro_batch_sequences * config.train.sequence_tokens
    statistics = 4 * (2 * model.width + model.heads) * layers["T"]
    keys_and_values = 2 * e * model.width * max(0, model.window - 1) * layers["A"]
    tiles = math.ceil(config.row_tokens / config.held_tokens)
    return tiles * (statistics + keys_and_values) / config.parallel.tensor * (rows / config.row_tokens)


def weights_and_optimizer(config: PretrainConfig, ranks: int) -> tuple[float, float]:
    """Bytes of a rank, wherever they lie."""
    n, stage, e = numbers_here(config), config.parallel.zero_stage, ELEMENT_BYTES[config.train.dtype]
    part = n * config.parallel.tensor / ranks
    if stage == 0:
        return e * n, 8 * n
    if stage < 3:
        return e * n, 12 * part
    partition = 0.0 if config.parallel.offload == "all" else e * part
    return e * min(n, GATHERED) + partition, 12 * part


def bytes_a_token(config: PretrainConfig) -> float:
    """What autograd keeps of a token until the backward."""
    layers, e = layers_by_letter(config.model), ELEMENT_BYTES[config.train.dtype]
    blocks = sum(count * _block_bytes_a_token(config, letter).kept for letter, count in layers.items())
    return blocks + e * config.model.width / config.parallel.tensor


class BlockBytes(NamedTuple):
    """What there is of a block."""

    kept: float
    """From its forward to its backward."""
    in_backward: float
    """More than that, while its backward runs."""


def block_bytes(config: PretrainConfig) -> BlockBytes:
    """Of a micro-batch, in the kind of block that has most."""
    tokens, e, tensor = held_here(config), ELEMENT_BYTES[config.train.dtype], config.parallel.tensor
    stream = e * config.model.width / tensor
    blocks = [_block_bytes_a_token(config, letter) for letter, count in layers_by_letter(config.model).items() if count]
    kept, in_backward = (tokens * max(parts) for parts in zip(*blocks, strict=True))
    if config.memory.mlp_tokens is None:
        return BlockBytes(kept, in_backward + 4 * stream * tokens)
    row_tokens = config.held_tokens / config.parallel.sequence
    portion = tokens / row_tokens * min(config.memory.mlp_tokens * tensor, row_tokens)
    return BlockBytes(kept, in_backward + 3 * stream * tokens + (_mlp_bytes_a_token(config) + 4 * stream) * portion)


def _block_bytes_a_token(config: PretrainConfig, letter: str) -> BlockBytes:
    """Without the gradients in the backward, and what a portion of the MLP has."""
    model, parallel = config.model, config.parallel
    C, H, e, ranks = model.width, model.heads, ELEMENT_BYTES[config.train.dtype], parallel.sequence
    stream, scale = e * C / parallel.tensor, 1 if model.layer_scale else 0
    if letter == "T":
        if config.run.device == "cpu":
            chunk = min(config.held_tokens / ranks, max(32, CHUNK_ELEMENTS_ON_CPU // C))
        else:
            chunk = CHUNK_TOKENS_ON_GPU
        mixer = e * C + 4 * H + 4 * (2 * C + H) / chunk
        received = 4.0 * parallel.tensor if parallel.tensor > 1 else 0.0
    else:
        turned = bool(model.rope_theta)
        attention = (1 if turned else 3) + 2 * ranks if ranks > 1 else (5 if turned else 3)
        mixer = e * C * attention + 4 * H
        received = 2 * ranks * stream if ranks > 1 else 0.0
    mixer = (3 + scale) * stream + (mixer + 8) / parallel.tensor
    held = mixer + (_mlp_bytes_a_token(config) if config.memory.mlp_tokens is None else stream)
    if config.memory.recompute == "nothing":
        return BlockBytes(held, 0.0)
    return BlockBytes(stream + received, held - stream)


def _mlp_bytes_a_token(config: PretrainConfig) -> float:
    model, e = config.model, ELEMENT_BYTES[config.train.dtype]
    return ((11 if model.layer_scale else 10) * e * model.width + 8) / config.parallel.tensor


def loss_bytes(config: PretrainConfig) -> float:
    """What the loss takes while it and its gradients are computed, in the forward."""
    C, e, tokens = config.model.width, ELEMENT_BYTES[config.train.dtype], held_here(config)
    words, beside = config.model.vocab_size / config.parallel.tensor, e if e < 4 else 0
    portion = min(tokens, LOGITS_BYTES / ((4 + beside) * words))
    return ((4 + beside) * words + e * C) * portion + (4 + beside) * words * C + 2 * e * C * tokens


def _gradients(config: PretrainConfig, ranks: int) -> dict[str, Gradients]:
    """By moment, in order of time (DeepSpeed 0.19, runtime/zero/stage_1_and_2.py and stage3.py)."""
    parallel, n, e = config.parallel, numbers_here(config), ELEMENT_BYTES[config.train.dtype]
    tensor, stage = parallel.tensor, parallel.zero_stage
    part, alone, on_cpu = n * tensor / ranks, ranks == tensor, config.run.device == "cpu"
    accumulates = config.accumulation(ranks) > 1
    filled = min(n, BUCKET)
    bucket = (e if stage == 2 else 4) * (filled if on_cpu else BUCKET)
    waiting_bucket = 0.0 if on_cpu else bucket  # before anything is written to it
    unfused = 8 * part if on_cpu else 0.0
    tied = e * config.model.vocab_size * config.model.width / tensor  # its gradient comes from head and embedding

    if stage == 0:
        so_far = 4 * n if accumulates else 0.0
        steps = [(so_far, 0), (so_far, 0), (4 * n, tied), (4 * n, 4 * filled), (4 * n, 0)]
    elif stage == 1:
        so_far = 4 * n if accumulates else 0.0
        copy = 0 if alone and e == 4 else 4 * filled
        # In float32 the partition's gradients are made flat once more; in bfloat16 the others' still lie in the bucket.
        at_update = 4 * part if e == 4 else (0 if alone else bucket)
        steps = [
            (so_far, waiting_bucket if accumulates else 0), (so_far, waiting_bucket), (4 * n, tied + waiting_bucket),
            (4 * part, bucket + copy), (4 * part, at_update + unfused),
        ]  # fmt: skip
    elif stage == 2:
        so_far = 4 * part if accumulates else 0.0
        copy = 6 * filled if e == 2 else (0 if alone else 4 * filled)
        here = so_far + 4 * part if e == 4 else 4 * part
        steps = [
            (so_far, 0), (so_far, waiting_bucket), (so_far, bucket + tied), (here, bucket + copy),
            (4 * part, (4 * part if e == 4 else 0) + unfused),
        ]  # fmt: skip
    else:
        waiting_bucket = bucket  # for good
        steps = [
            (4 * part, bucket), (4 * part, bucket), (4 * part + e * filled, bucket + tied),
            (4 * part + e * filled, bucket + 4 * filled), (4 * part, bucket + 4 * part + unfused),
        ]  # fmt: skip
    if parallel.offload != "none":
        steps[-1] = (0.0, waiting_bucket)  # updated on the host
    return {name: Gradients(*step) for name, step in zip(MOMENTS, steps, strict=True)}
