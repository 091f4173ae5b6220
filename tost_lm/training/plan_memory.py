"""What a rank's memory holds while it trains, from the settings alone.

Told at the moments of a step that may be the fullest. With n numbers trained a tensor rank, R replicas (data × sequence
ranks), t tensor ranks, e bytes an element (2 in bfloat16):

**Weights** e·n; at stage 3 a partition, and up to 10⁹ gathered numbers beside it. **Optimizer** 12·n/R: DeepSpeed's
float32 copy of the weights, in float32 too, and AdamW's two moments; 8·n at stage 0, without a copy.

**Activations**, what autograd keeps for the backward, in units of e·C/t bytes a token: 16 a T layer (the inputs of two
norms 2, of four linears 1 + 1 + 1 + 4, of GELU 4, of two LayerScales 2, and the operator's w 1), 2 less without
LayerScale. An A layer keeps q, k and v in place of w (3; 5 where q and k are turned, since v alone keeps the memory of
all three; k and v of the whole sequence where its tokens lie on several ranks). Besides, in bytes: Π 4·H, sums before
each chunk 4·(2C + H) a chunk, or attention's 4·H; the norms' statistics 16; and 2·e·C in all for the last norm and the
head.

**Loss** log-probabilities, their gradient and that of the logits, float32: 12·V bytes a token. Over tensor ranks
Megatron's works in place, and the cut to real tokens makes one copy: 8·V/t. Megatron also keeps the residual stream
gathered last.

**Gradients and buffers** by stage in `_gradients`: DeepSpeed fills a bucket of 5·10⁸ gradients and copies it to send
it. A GPU has the bucket whole whatever the model, a CPU what is written to. AdamW on a CPU is not fused and needs two
more numbers for each of its own.

Not in it: the device's context, libraries and NCCL (`cluster.reserved_gb`), what is torn by the allocator, and the
asynchronous checkpoint, which lies in host memory.
"""

from typing import NamedTuple

from tost_lm.model.flops import layers_by_letter, parameters
from tost_lm.training.config import PretrainConfig

BUCKET = 500_000_000  # elements: DeepSpeed's reduce_bucket_size
GATHERED = 1_000_000_000  # elements: its stage3_max_live_parameters
CHUNK_TOKENS_ON_GPU = 32  # tost_lm.ops.triton.tiles
CHUNK_ELEMENTS_ON_CPU = 1 << 19  # tost_lm.ops.chunked
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}

LOSS, BLOCKS = "at the loss", "as the blocks' backward begins"
MOMENTS = (LOSS, BLOCKS, "as the backward ends", "as gradients are sent", "at the update")


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
        ConfigError: the ranks or the batch cannot be shared out evenly.
    """
    tokens = tokens_here(config)
    weights, optimizer = weights_and_optimizer(config, ranks)
    if config.parallel.offload != "none":
        optimizer = 0.0
    kept, e = bytes_a_token(config) * tokens, ELEMENT_BYTES[config.train.dtype]
    stream = e * tokens * config.model.width
    gathered = stream if config.parallel.tensor > 1 else 0.0
    activations_and_loss = {
        LOSS: (kept, loss_bytes_a_token(config) * tokens),
        # The last MLP: beside the stream's gradient those of its output and of GELU's, when the head is done with.
        BLOCKS: (kept + 3 * stream / config.parallel.tensor, 0.0),
    }
    return [
        Moment(name, weights, optimizer, gradients, *activations_and_loss.get(name, (0.0, 0.0)), buffers + gathered)
        for name, (gradients, buffers) in _gradients(config, ranks).items()
    ]


def fullest(config: PretrainConfig, ranks: int) -> Moment:
    return max(moments(config, ranks), key=lambda moment: moment.total)


def numbers_here(config: PretrainConfig) -> float:
    """Numbers trained by a rank's tensor part of the model."""
    parts = parameters(config.model)
    return parts.positions + parts.scales + (parts.embedding + parts.mixers + parts.mlps) / config.parallel.tensor


def tokens_here(config: PretrainConfig) -> float:
    """Of a micro-batch, on a sequence rank."""
    return config.train.micro_batch_sequences * config.train.sequence_tokens / config.parallel.sequence


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
    model, parallel = config.model, config.parallel
    C, H, e = model.width, model.heads, ELEMENT_BYTES[config.train.dtype]
    layers, scales = layers_by_letter(model), 2 if model.layer_scale else 0
    if config.run.device == "cpu":
        chunk = min(config.row_tokens / parallel.sequence, max(32, CHUNK_ELEMENTS_ON_CPU // C))
    else:
        chunk = CHUNK_TOKENS_ON_GPU
    turned = bool(model.rope_theta)
    attention = (1 if turned else 3) + 2 * parallel.sequence if parallel.sequence > 1 else (5 if turned else 3)
    tssa = e * (13 + scales + 1) * C + 4 * H + 4 * (2 * C + H) / chunk
    softmax = e * (13 + scales + attention) * C + 4 * H
    return (layers["T"] * tssa + layers["A"] * softmax + 16 * model.layers + 2 * e * C) / parallel.tensor


def loss_bytes_a_token(config: PretrainConfig) -> float:
    vocabulary, tensor = config.model.vocab_size, config.parallel.tensor
    return 12 * vocabulary if tensor == 1 else 8 * vocabulary / tensor


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
