"""The time of a pre-training step on a cluster, from the settings alone.

Times are sums, but weights and gradients of blocks are sent while others are computed (`exposed_seconds`). The
fractions of published hardware figures that a run reaches are settings (`cluster.achieved_flops`,
`cluster.achieved_memory_bandwidth`, `cluster.achieved_bandwidth`). The constants below are from one GPU, an NVIDIA
H200, whose cells are in `results/benchmarks/gpu_nvidia-h200.json`, but for SLOWED and IMBALANCE, which are fitted to
published runs (`python -m benchmarks.published`). Bytes and launches are counted.
"""

import math
import re
from typing import NamedTuple

from tost_lm.errors import ConfigError
from tost_lm.mixers.spec import Costs, MixerSpec
from tost_lm.model.flops import block_matrices, flops_per_token, peak_flops
from tost_lm.optim.interface import optimizer_of
from tost_lm.pretrain.plan import traffic
from tost_lm.pretrain.plan.activations import ELEMENT_BYTES, costs_of, over_layers, tiles
from tost_lm.pretrain.plan.groups import groups_of, shards, stage_of
from tost_lm.pretrain.plan.memory import logit_tiles, state_bytes
from tost_lm.pretrain.plan.settings import PlanConfig

ATTENTION_FLOPS = {"fa2": 0.35, "fa3": 0.55}
"""Fraction of the peak with heads of 128 channels: of Flash Attention 2 on the H200; of 3 an estimate of both passes,
where its authors report up to 0.75 forward on H100 (arXiv 2407.08608)."""
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
MODEL_LAUNCHES = 21
"""Operations outside the blocks for a tile of a micro-batch: embedding, last norm and loss."""
COLLECTIVE_LAUNCHES = 3
"""Operations of a collective: a copy into its buffer, itself, and a copy out."""
SLOWED, IMBALANCE = 0.4, 0.005
"""Fraction of the time of hidden collectives by which they slow down what they run behind, and of the step by which the
ranks wait for each other at each doubling of the nodes."""
UPDATE_LAUNCHES = 24
"""Operations after the last backward, of AdamW 4, beside two for each parameter: its norm, and its copy in bfloat16."""


class Step(NamedTuple):
    """Seconds of an optimizer step, by use."""

    products: float
    attention: float
    operator: float
    elementwise: float
    loss: float
    """Beside its products."""
    optimizer: float
    copies: float
    """Between GPU and host, which nothing hides."""
    launches: float = 0.0
    """Time by which the host's launches of kernels exceed those before."""
    communication: float = 0.0
    """Time in which the ranks wait for collectives, or are slowed down by those that run behind."""
    imbalance: float = 0.0
    """Waits of all nodes for the slowest one."""

    @property
    def total(self) -> float:
        return sum(self)


def step_seconds(config: PlanConfig) -> Step:
    """Raises ConfigError when the device's peak is unknown or the batch is not divisible by the ranks."""
    cluster, (products_again, attention_again) = config.cluster, traffic.recomputed_flops(config)
    flops = flops_per_token(config.model, config.train.seq_len)
    tokens = config.batch_tokens / cluster.ranks  # per rank
    rate, kernels = tokens / peak(config), mixer_launches(config) - PRODUCTS * config.model.layers  # of a tile
    found = Step(
        products=(flops.products.total + products_again) * rate / cluster.achieved_flops,
        attention=(flops.attention.total + attention_again) * rate / attention_rate(config),
        operator=tokens * operator_bytes_per_token(config) / bandwidth(config)
        + KERNEL_SECONDS * config.micro_batches * tiles(config) * kernels,
        elementwise=tokens * elementwise_bytes_per_token(config) / bandwidth(config),
        loss=bytes_moved_by_loss(config) / bandwidth(config),
        optimizer=optimizer_seconds(config),
        copies=traffic.copied_bytes(config) / (cluster.host_link_gb_s * 1e9 * cluster.achieved_bandwidth),
    )
    found = found._replace(launches=max(0.0, launches(config) * cluster.launch_us * 1e-6 - found.total))
    found = found._replace(communication=exposed_seconds(config, found.total - found.optimizer - found.copies))
    return found._replace(imbalance=found.total * IMBALANCE * math.log2(cluster.nodes))


def exposed_seconds(config: PlanConfig, computed: float) -> float:
    """Time of collectives beyond that in which forwards and backwards compute at the same time, given the seconds of
    all forwards and backwards of a step, and SLOWED of the rest. A backward takes twice the time of a forward, and that
    of recomputation."""
    found, in_forwards = traffic.collectives(config), 1 + traffic.fraction_computed_twice(config)
    exposed = sum(one.seconds(config.cluster) for one in found if not one.during)
    for during, passes in (("forward", in_forwards), ("backward", traffic.mixer_forwards(config) + 2 - in_forwards)):
        behind = [one for one in found if one.during == during]
        seconds = sum(one.seconds(config.cluster) for one in behind)
        hidden = (
            computed * passes / (traffic.mixer_forwards(config) + 2) * max((one.passes for one in behind), default=0.0)
        )
        exposed += max(SLOWED * seconds, seconds - (1 - SLOWED) * hidden)
    return exposed


def attention_rate(config: PlanConfig) -> float:
    """Fraction of the peak that products between tokens reach, in the slowest mixer."""
    cluster, head = config.cluster, min(costs_of(config, spec).attention_head for spec, _ in config.model.mixers)
    slowed = min(1.0, cluster.narrow_heads ** math.log2(128 / head))
    return (cluster.achieved_attention_flops or ATTENTION_FLOPS[config.train.attention]) * slowed


def bandwidth(config: PlanConfig) -> float:
    """Bytes per second that a copy reads and writes."""
    return config.cluster.memory_gb_s * 1e9 * config.cluster.achieved_memory_bandwidth


def launches(config: PlanConfig) -> float:
    """Operations that the host launches in a step."""
    around = COMPILED_BLOCK_LAUNCHES if config.train.compile else BLOCK_LAUNCHES
    each = config.model.layers * around + mixer_launches(config) + MODEL_LAUNCHES
    sent = COLLECTIVE_LAUNCHES * sum(one.calls for one in traffic.collectives(config))
    return config.micro_batches * tiles(config) * each + update_launches(config) + sent


def update_launches(config: PlanConfig) -> float:
    """Operations that sum gradients over backwards, and that update the weights."""
    backwards = config.micro_batches * tiles(config)
    return (backwards + 2) * traffic.TENSORS_PER_LAYER * config.model.layers + UPDATE_LAUNCHES


def update_flops(config: PlanConfig) -> float:
    """FLOPs of the matrix products of an update, on every rank."""
    return sum(optimizer_of(config.optim).matrix_flops(*shape) for shape in block_matrices(config.model))


def peak(config: PlanConfig) -> float:
    """FLOP/s of a GPU. Raises ConfigError when it is unknown, or the GPU lacks the kernels of train.attention."""
    cluster = config.cluster
    if config.train.attention == "fa3" and not re.search(r"\bG?H\d", cluster.device):
        raise ConfigError(f"train.attention fa3: for Hopper GPUs only, not {cluster.device}; set train.attention=fa2")
    known = (cluster.peak_tflops and cluster.peak_tflops * 1e12) or peak_flops(cluster.device, config.train.dtype)
    if known is None:
        raise ConfigError(f"cluster.device {cluster.device!r}: its peak FLOP/s is unknown; set cluster.peak_tflops")
    return known


def mixer_launches(config: PlanConfig) -> float:
    """Launches of all mixers for a tile of a micro-batch; of recomputation only those that grow with the tokens."""
    forwards = traffic.mixer_forwards(config)
    of_maps = over_layers(config, lambda spec, costs: forwards * costs.launches_of_maps[0] + costs.launches_of_maps[1])
    return of_maps + over_layers(config, lambda spec, costs: costs.launches)


def operator_bytes_per_token(config: PlanConfig) -> float:
    """Bytes per token between the projections, forward and backward, at the bandwidth of a copy."""

    def of_layer(spec: MixerSpec, costs: Costs) -> float:
        forward, backward = costs.moved or (2 * costs.stored, 3 * costs.stored)
        return (traffic.mixer_forwards(config) * forward + backward) / spec.kernel_bandwidth

    return over_layers(config, of_layer)


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
    mixers = traffic.mixer_forwards(config) * forward + backward
    mlps = traffic.mlp_forwards(config) * (forward + of_mlp[0] * hidden) + backward + of_mlp[1] * hidden
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
    """Duration of the sums of gradients, copies of what is sent, norm, clipping and the update, where the optimizer's
    state is: the ranks of a node share the bandwidth of its memory."""
    cluster, rate = config.cluster, bandwidth(config)
    if config.parallel.offload != "none":
        rate = cluster.host_memory_gb_s * 1e9 * cluster.achieved_memory_bandwidth / cluster.gpus_per_node
    in_bfloat16 = (peak_flops(cluster.device, "bfloat16") or peak(config)) * cluster.achieved_flops
    in_bytes = gradient_bytes(config) + update_bytes(config) / optimizer_of(config.optim).bandwidth
    kernels = update_launches(config) * KERNEL_SECONDS
    return in_bytes / rate + update_flops(config) / in_bfloat16 + kernels


def gradient_bytes(config: PlanConfig) -> float:
    """Bytes that a rank reads and writes beside its forwards, backwards and update.

    Per number: sums over backwards 4 + e for the first in bfloat16, 8 + e for each other one, or 12 of the shards if
    each backward reduces its gradients; norm, in float64, 20, and clipping 8 of the rank's shards; with all weights on
    a rank their copy in bfloat16 4 + e. Buffers: a gather is copied out, 2·e, a reduction copied in, e + 4, and an
    all-reduce in, divided and out, 24.
    """
    ranks, e, backwards = config.cluster.ranks, ELEMENT_BYTES[config.train.dtype], config.micro_batches * tiles(config)
    total, stage, in_bfloat16 = groups_of(config, ranks).total, stage_of(config, ranks), e < 4
    plain = stage == 0
    summed = (8 + e) * (backwards - 1) + ((4 + e) if in_bfloat16 and (plain or backwards > 1) else 0)
    if stage > 1:
        summed = 12 * (backwards - 1) / shards(config, ranks)
    copied = (4 + e) * total.numbers if plain and in_bfloat16 else 0
    buffers = {"all-gather": 2 * shards(config, ranks), "reduce-scatter": 1 + e / 4, "all-reduce": 6 if plain else 0}
    sent = sum(buffers[one.kind] * one.input_bytes for one in traffic.collectives_of_replicas(config))
    return summed * total.numbers + 28 * total.padded / shards(config, ranks) + copied + sent


def update_bytes(config: PlanConfig) -> float:
    """Bytes of a rank's update: it reads gradient, weight and state, and writes the last two."""
    n = groups_of(config, config.cluster.ranks).total.numbers
    state = state_bytes(config, n, config.parallel.tensor)
    return (12 * n + 2 * state) / shards(config, config.cluster.ranks)
