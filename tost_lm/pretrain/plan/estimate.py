"""The time of a pre-training step on a cluster, from the settings alone.

Times are sums, because no overlap is assumed. The fractions of published hardware figures that a run reaches are
settings (`cluster.achieved_flops`, `cluster.achieved_memory_bandwidth`, `cluster.achieved_bandwidth`). The constants
below are from one GPU, an NVIDIA H200, whose cells are in `results/benchmarks/gpu_nvidia-h200.json`. Bytes and launches
are counted.
"""

import math
from typing import NamedTuple

from tost_lm.errors import ConfigError
from tost_lm.model.flops import block_matrices, flops_per_token, peak_flops
from tost_lm.optim.interface import optimizer_of
from tost_lm.pretrain.plan.activations import ELEMENT_BYTES, costs_of
from tost_lm.pretrain.plan.memory import logit_tiles, parameters_per_rank, reduces_at_end, state_bytes, zero_stage_of
from tost_lm.pretrain.plan.settings import PlanConfig
from tost_lm.pretrain.plan.traffic import (
    TENSORS_PER_LAYER,
    collectives,
    mixer_forwards,
    mlp_forwards,
    recomputed_flops,
    tiles,
)
from tost_lm.sizes import CAST_ELEMENTS

KERNEL_SECONDS = 2.3e-6
"""Time of a kernel of any size, beside that of its bytes: TSSA at three lengths."""
EAGER, COMPILED = 0.55, 0.67
"""Fractions of a copy's bandwidth that operations between products, mixers and loss reach: the steps of tost-base with
60 × 1,024 tokens."""
PRODUCTS = 6
"""Products of matrices of two linear layers, forward and backward: those of a mixer, or of an MLP."""
BLOCK_LAUNCHES = 32
"""Operations of a block around its mixer: norms, LayerScale, MLP and sums."""
COMPILED_BLOCK_LAUNCHES = 16 + PRODUCTS
"""The same under torch.compile, at most, which makes few kernels of all but the products: a graph may also join
operations of the mixer around its operators."""
MODEL_LAUNCHES = 22
"""Operations outside the blocks for a tile of a micro-batch: embedding, last norm and loss."""
UPDATE_LAUNCHES = 24
"""Operations after the last backward, of AdamW 4 (`tests/multiprocess/test_zero.py`)."""


class Step(NamedTuple):
    """Seconds of an optimizer step, by use."""

    products: float
    attention: float
    operator: float
    elementwise: float
    loss: float
    """Beside its products."""
    optimizer: float
    launches: float
    """Time by which the host's launches of kernels exceed those before."""
    communication: float

    @property
    def total(self) -> float:
        return sum(self)


def step_seconds(config: PlanConfig) -> Step:
    """Raises ConfigError when the device's peak is unknown or the batch is not divisible by the ranks."""
    cluster, (products_again, attention_again) = config.cluster, recomputed_flops(config)
    flops = flops_per_token(config.model, config.train.seq_len)
    tokens = config.batch_tokens / cluster.ranks  # per rank
    rate = tokens / peak(config)
    found = Step(
        products=(flops.products.total + products_again) * rate / cluster.achieved_flops,
        attention=(flops.attention.total + attention_again) * rate / cluster.achieved_attention_flops * busiest(config),
        operator=tokens * operator_bytes_per_token(config) / bandwidth(config) + mixer_kernel_seconds(config),
        elementwise=tokens * elementwise_bytes_per_token(config) / bandwidth(config),
        loss=bytes_moved_by_loss(config) / bandwidth(config),
        optimizer=optimizer_seconds(config),
        launches=0.0,
        communication=sum(one.seconds(cluster) for one in collectives(config)),
    )
    return found._replace(launches=max(0.0, host_seconds(config) - sum(found[:-2])))


def busiest(config: PlanConfig) -> float:
    """Attention of the sequence rank with the most, over the mean."""
    return max(costs_of(config, spec).busiest for spec, _ in config.model.mixers)


def bandwidth(config: PlanConfig) -> float:
    """Bytes per second that a copy reads and writes."""
    return config.cluster.memory_gb_s * 1e9 * config.cluster.achieved_memory_bandwidth


def mixer_kernel_seconds(config: PlanConfig) -> float:
    """Time that the kernels of operators take in a step whatever their size."""
    in_mixers = mixer_launches(config) - PRODUCTS * config.model.layers
    return KERNEL_SECONDS * config.micro_batches * tiles(config) * in_mixers


def host_seconds(config: PlanConfig) -> float:
    """Time in which the host launches the kernels of a step."""
    return launches(config) * config.cluster.launch_us * 1e-6


def launches(config: PlanConfig) -> float:
    """Operations that the host launches in a step."""
    around = COMPILED_BLOCK_LAUNCHES if config.train.compile else BLOCK_LAUNCHES
    each = config.model.layers * around + mixer_launches(config) + MODEL_LAUNCHES
    return config.micro_batches * (tiles(config) * each + sum_launches(config)) + UPDATE_LAUNCHES


def sum_launches(config: PlanConfig) -> float:
    """Operations that add the gradients of a micro-batch to sums: at stage 1 in bfloat16 a cast and a sum of many at
    once (`tost_lm.parallel.zero_step`), at others of each parameter."""
    if zero_stage_of(config, config.cluster.ranks) == 1 and config.train.dtype == "bfloat16":
        return 2 * math.ceil(parameters_per_rank(config) / CAST_ELEMENTS)
    return 2 * TENSORS_PER_LAYER * config.model.layers


def update_flops(config: PlanConfig) -> float:
    """FLOPs of the matrix products of an update, on every rank."""
    return sum(optimizer_of(config.optim).matrix_flops(*shape) for shape in block_matrices(config.model))


def peak(config: PlanConfig) -> float:
    """FLOP/s of a GPU."""
    cluster = config.cluster
    known = (cluster.peak_tflops and cluster.peak_tflops * 1e12) or peak_flops(cluster.device, config.train.dtype)
    if known is None:
        raise ConfigError(f"cluster.device {cluster.device!r}: its peak FLOP/s is unknown; set cluster.peak_tflops")
    return known


def mixer_launches(config: PlanConfig) -> float:
    """Launches of all mixers for a tile of a micro-batch."""
    letters = config.model.letters
    return sum(letters.count(spec.letter) * costs_of(config, spec).launches for spec, _ in config.model.mixers)


def operator_bytes_per_token(config: PlanConfig) -> float:
    """Bytes per token between the projections, forward and backward, at the bandwidth of a copy."""
    total = 0.0
    for spec, _ in config.model.mixers:
        costs = costs_of(config, spec)
        forward, backward = costs.moved or (2 * costs.stored, 3 * costs.stored)
        moved = mixer_forwards(config) * forward + backward
        total += config.model.letters.count(spec.letter) * moved / spec.kernel_bandwidth
    return total


def elementwise_bytes_per_token(config: PlanConfig) -> float:
    """Bytes per token that operations outside products, mixers and loss read and write, at the bandwidth of a copy.

    In bytes per channel. Each half of a layer, forward: norm 2·e, residual sum 8 + e; backward: norm 3·e and, for its
    weight's gradient, 2·e, gradient sum 12. In bfloat16 also conversions of the float32 residual stream, 4 + e each:
    forward 1, backward 2. LayerScale: forward 2·e, backward 2·e, and for its own gradient 4·e. Per hidden channel: GELU
    2·e and 3·e, SwiGLU 5·e and 13·e. Outside the blocks: the last norm, and 8·(1 + e) of the embedding and its
    gradient.

    Compiled, a half reads and writes once: forward stream, its sum with the branch, and the next norm's output 8 + 2·e
    (of the first norm in a block also the stream, 4); backward the gradient of the branch 4 + 2·e, and of the norm
    8 + 2·e, with its weight's gradient and LayerScale's 2·e more. SwiGLU takes 3·e and 5·e.
    """
    e, model, scaled = ELEMENT_BYTES[config.train.dtype], config.model, bool(config.model.layer_scale)
    convert = 4 + e if e < 4 else 0
    if config.train.compile:
        forward, backward = 10 + 2 * e, 12 + (6 if scaled else 5) * e
        of_mlp = (3 * e, 5 * e) if model.mlp == "swiglu" else (2 * e, 3 * e)
    else:
        forward = convert + 8 + (5 if scaled else 3) * e
        backward = 2 * convert + 12 + (11 if scaled else 5) * e
        of_mlp = (5 * e, 13 * e) if model.mlp == "swiglu" else (2 * e, 3 * e)
    hidden = model.mlp_width / model.width
    mixers = mixer_forwards(config) * forward + backward
    mlps = mlp_forwards(config) * (forward + of_mlp[0] * hidden) + backward + of_mlp[1] * hidden
    outside = 3 * convert + 7 * e + 2 * (4 + e) + 6 * e
    at_rate = (model.layers * (mixers + mlps) + outside) * model.width
    return at_rate / (COMPILED if config.train.compile else EAGER)


def bytes_moved_by_loss(config: PlanConfig) -> float:
    """Bytes of a step that the loss reads and writes beside its products.

    Its kernel takes 3·e per logit (`ops.cross_entropy_triton`). The gradient of the weight: zeros 4, a sum for each
    tile of logits 8 (in bfloat16 10), and its scaling 8 (14) per number.
    """
    e, model, tensor = ELEMENT_BYTES[config.train.dtype], config.model, config.parallel.tensor
    added, scaled = (8, 8) if e == 4 else (10, 14)
    weight = model.vocab_size * model.width / tensor
    tokens = config.batch_tokens / config.cluster.ranks
    logits = 3 * e * model.vocab_size * tokens
    return logits + config.micro_batches * (4 + scaled + added * logit_tiles(config).calls) * weight


def optimizer_seconds(config: PlanConfig) -> float:
    """Duration of the sums of gradients, their norm and clipping, and the update."""
    in_bfloat16 = (peak_flops(config.cluster.device, "bfloat16") or peak(config)) * config.cluster.achieved_flops
    in_bytes = gradient_bytes(config) + update_bytes(config) / optimizer_of(config.optim).bandwidth
    kernels = UPDATE_LAUNCHES + config.micro_batches * sum_launches(config)
    return in_bytes / bandwidth(config) + update_flops(config) / in_bfloat16 + kernels * KERNEL_SECONDS


def gradient_bytes(config: PlanConfig) -> float:
    """Bytes that a rank reads and writes between its backwards and the update.

    Per gradient: 4 + e for the first micro-batch, 16 + e for each other one (a cast and a sum). Of all or, where they
    are reduced in the backward, of its partition: the norm, in float64, 20, and zeros 4. Of the partition: clipping 8,
    and in bfloat16 the copy of the weights 4 + e.
    """
    n, e, ranks = parameters_per_rank(config), ELEMENT_BYTES[config.train.dtype], config.cluster.ranks
    stage, partition = zero_stage_of(config, ranks), n * config.parallel.tensor / ranks
    summed = n if reduces_at_end(config, stage) else partition
    updated = 8 + 4 + e if e < 4 else 8
    return (4 + e + (config.micro_batches - 1) * (16 + e)) * n + 24 * summed + updated * (partition if stage else n)


def update_bytes(config: PlanConfig) -> float:
    """Bytes of a rank's update: it reads gradient, weight and state, and writes the last two."""
    n, tensor, ranks = parameters_per_rank(config), config.parallel.tensor, config.cluster.ranks
    return (12 * n + 2 * state_bytes(config, n, tensor)) * (tensor / ranks if zero_stage_of(config, ranks) else 1)
