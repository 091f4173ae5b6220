"""What a pre-training run will take on a cluster, from the settings alone: work, traffic, time, and what would fit.

Times are sums: nothing is taken to overlap. How near the hardware comes to its published figures is a setting
(`cluster.achieved_flops`, `cluster.achieved_bandwidth`), not a measurement.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from tost_lm.config import differences
from tost_lm.config.section import leaves
from tost_lm.errors import ConfigError
from tost_lm.model.flops import FlopsPerToken, flops_per_token, layers_by_letter, parameters, peak_flops
from tost_lm.parallel.config import obstacle_to_tensor_ranks
from tost_lm.training.plan_config import ClusterConfig, PlanConfig
from tost_lm.training.plan_memory import (
    BUCKET,
    ELEMENT_BYTES,
    LOGITS_BYTES,
    fullest,
    held_here,
    largest_tile,
    numbers_here,
    tokens_here,
    weights_and_optimizer,
)

OPERATIONS = 80  # of a layer and micro-batch, forward and backward: torch's dispatcher counts 74 in an A layer
CHECKPOINT_BYTES = 12  # a parameter: the weight and AdamW's two moments, float32


class Sending(NamedTuple):
    """Collectives of one kind, of a rank in a step."""

    what: str
    kind: Literal["all-gather", "reduce-scatter", "all-reduce"]
    calls: float
    handed: float
    """Bytes that the rank hands over in all these calls."""
    ranks: int
    """That take part."""
    stride: int
    """Ranks from one of them to the next."""

    @property
    def on_link(self) -> float:
        """Bytes that leave the rank, in a ring."""
        others = self.ranks - 1
        shares = {"all-gather": others, "reduce-scatter": others / self.ranks, "all-reduce": 2 * others / self.ranks}
        return self.handed * shares[self.kind]

    def seconds(self, cluster: ClusterConfig) -> float:
        """Nodes are crossed once by each ring; the groups that a node has side by side share its network."""
        rate = cluster.link_gb_s
        if self.ranks * self.stride > cluster.gpus_per_node:
            rate = min(rate, cluster.network_gb_s / min(self.stride, cluster.gpus_per_node))
        return self.on_link / (rate * 1e9 * cluster.achieved_bandwidth) + self.calls * cluster.latency_us * 1e-6


class Step(NamedTuple):
    """Seconds of an optimizer step, by what they are spent on."""

    products: float
    operator: float
    elementwise: float
    launching: float
    """What starting all these takes longer than they do."""
    optimizer: float
    communication: float

    @property
    def total(self) -> float:
        return sum(self)


def work(config: PlanConfig) -> FlopsPerToken:
    """Operations a token, forward and backward."""
    return flops_per_token(config.model, config.train.sequence_tokens)


def step_seconds(config: PlanConfig) -> Step:
    """Raises ConfigError when the device's peak is not known, or the ranks do not fit."""
    cluster, flops = config.cluster, work(config)
    tokens = config.batch_tokens / cluster.ranks  # of a rank, were all work shared out
    bandwidth = cluster.memory_gb_s * 1e9 * cluster.achieved_bandwidth
    again = products_again(config)
    products = (flops.products.total + flops.attention.total + again) * tokens / (peak(config) * cluster.achieved_flops)
    operator = operator_bytes_a_token(config) * tokens / bandwidth
    elementwise = elementwise_bytes_a_token(config) * tokens / bandwidth
    launches = config.micro_batches * tiles(config) * config.model.layers * OPERATIONS * cluster.launch_us * 1e-6
    return Step(
        products,
        operator,
        elementwise,
        launching=max(0.0, launches - products - operator - elementwise),
        optimizer=optimizer_bytes(config) / bandwidth,
        communication=sum(sending.seconds(cluster) for sending in sendings(config)),
    )


def peak(config: PlanConfig) -> float:
    """FLOP/s of a GPU."""
    cluster = config.cluster
    known = (cluster.peak_tflops and cluster.peak_tflops * 1e12) or peak_flops(cluster.device, config.train.dtype)
    if known is None:
        raise ConfigError(f"cluster.device {cluster.device!r} is not known: set cluster.peak_tflops")
    return known


def tiles(config: PlanConfig) -> int:
    """Of a row."""
    return math.ceil(config.row_tokens / config.held_tokens)


def read_twice(config: PlanConfig) -> float:
    """Share of the tokens that are read once more, for the states between tiles: those of all tiles but the last."""
    before_last = (tiles(config) - 1) * config.held_tokens
    return 0.0 if config.train.truncate_tokens else before_last / config.row_tokens


def forwards_for_backward(config: PlanConfig) -> int:
    """How often a block's forward is computed from its tile's state on."""
    return 2 if config.memory.recompute == "blocks" else 1


def forwards(config: PlanConfig) -> float:
    """How often a block's forward is computed."""
    return forwards_for_backward(config) + read_twice(config)


def mlp_portions(config: PlanConfig) -> int:
    """Of the tokens of a row in a rank's residual stream."""
    tokens = math.ceil(config.held_tokens / config.parallel.sequence / config.parallel.tensor)
    return math.ceil(tokens / (config.memory.mlp_tokens or tokens))


def mlp_forwards(config: PlanConfig) -> float:
    """Portions, taken as equal, are computed again by themselves; a block that is so stops at the last one's input."""
    if config.memory.mlp_tokens is None:
        return forwards(config)
    return forwards(config) + 1 - (forwards_for_backward(config) - 1) / mlp_portions(config)


def products_again(config: PlanConfig) -> float:
    """Operations a token that the backward computes again."""
    model, flops = config.model, work(config)
    forward = flops.products.forward + flops.attention.forward - 2 * model.vocab_size * model.width
    mlps = 16 * model.layers * model.width**2
    return (forwards(config) - 1) * (forward - mlps) + (mlp_forwards(config) - 1) * mlps


def operator_bytes_a_token(config: PlanConfig) -> float:
    """What the Triton kernels read and write, forward and backward (`tost_lm.ops.triton`)."""
    e, C, H = ELEMENT_BYTES[config.train.dtype], config.model.width, config.model.heads
    forward, backward = 4 * e * C + C + 8 * H, 7 * e * C + 1.75 * C + 20 * H
    return layers_by_letter(config.model)["T"] * (forwards(config) * forward + backward)


def elementwise_bytes_a_token(config: PlanConfig) -> float:
    """What runs outside products and operator reads and writes, an eager operation at a time.

    Each half of a layer, in tensors of e·C: its norm 2 and 3, residual sum 3 and 3, LayerScale 2 and 6; GELU 8 and 12.
    The loss, in V: largest, difference, exponential, sum and gradient in float32 32, to and from bfloat16 12; and the
    gradient of its weight, summed over portions, 8 (in bfloat16 10) a portion and channel.
    """
    e, model = ELEMENT_BYTES[config.train.dtype], config.model
    forward, backward = (7, 12) if model.layer_scale else (5, 6)
    half = forwards(config) * forward + backward
    mlp_half = mlp_forwards(config) * (forward + 8) + backward + 12
    words = model.vocab_size / config.parallel.tensor
    portion = min(held_here(config), LOGITS_BYTES / (words * (4 if e == 4 else 6)))
    loss = (32 + 8 * model.width / portion) if e == 4 else (44 + 10 * model.width / portion)
    return model.layers * (half + mlp_half) * e * model.width + loss * model.vocab_size


def optimizer_bytes(config: PlanConfig) -> float:
    """What a rank's update reads and writes: gradient, weight and two moments in, the last three out."""
    parts = numbers_here(config)
    share = 1 if config.parallel.zero_stage == 0 else config.parallel.tensor / config.cluster.ranks
    return 28 * parts * share


def sendings(config: PlanConfig) -> list[Sending]:
    """All collectives of a rank in a step. Raises ConfigError when ranks or batch cannot be shared out evenly."""
    found = [*_of_replicas(config), *_of_tensor_ranks(config), *_of_sequence_ranks(config)]
    return [sending for sending in found if sending.ranks > 1]


def _of_replicas(config: PlanConfig) -> Iterator[Sending]:
    """DeepSpeed's, over data × sequence ranks; stages 1 and 2 reduce gradients on all, 2 every micro-batch."""
    n, e, tensor = numbers_here(config), ELEMENT_BYTES[config.train.dtype], config.parallel.tensor
    stage, micro_batches, replicas = config.parallel.zero_stage, config.micro_batches, config.cluster.ranks // tensor
    buckets = math.ceil(n / BUCKET)
    if stage < 3:
        times = micro_batches if stage == 2 else 1
        yield Sending("gradients", "all-reduce", times * buckets, times * 4 * n, replicas, tensor)
        if stage:
            yield Sending("weights", "all-gather", 2, e * n / replicas, replicas, tensor)
        return
    tensors = 10 * config.model.layers  # gathered one by one, at most twice a micro-batch
    yield Sending(
        "weights", "all-gather", 2 * micro_batches * tensors, 2 * micro_batches * e * n / replicas, replicas, tensor
    )
    yield Sending("gradients", "reduce-scatter", micro_batches * buckets, micro_batches * 4 * n, replicas, tensor)


def _of_tensor_ranks(config: PlanConfig) -> Iterator[Sending]:
    """Megatron's, with its sequence parallelism: the residual stream is gathered before each pair of linears and
    scattered after it, gathered once more in the backward for the weights' gradients, and both again where a block or
    an MLP is computed again. Ours: one number a token for the softmax over heads, and three backward, and two for the
    loss; gradients of what every rank has whole."""
    model, ranks, k, M = config.model, config.parallel.tensor, config.micro_batches, tokens_here(config)
    stream = ELEMENT_BYTES[config.train.dtype] * M * model.width
    layers, tssa, parts = model.layers, layers_by_letter(model)["T"], parameters(model)
    mixers, mlps, portions = layers * forwards(config), layers * mlp_forwards(config), mlp_portions(config)
    whole = (4 if model.layer_scale else 2) * layers + 1 + (parts.positions > 0)
    # Of mixers, embedding and head, and of MLPs.
    whole_rows, in_portions = mixers + 2 * layers + 2, mlps + 2 * layers
    calls, handed = whole_rows + portions * in_portions, (whole_rows + in_portions) * stream / ranks
    yield Sending("residual stream", "all-gather", k * calls, k * handed, ranks, 1)
    whole_rows, in_portions = mixers + layers + 2, mlps + layers
    calls, handed = whole_rows + portions * in_portions, (whole_rows + in_portions) * stream
    yield Sending("residual stream", "reduce-scatter", k * calls, k * handed, ranks, 1)
    yield Sending("softmax over heads", "all-gather", k * 2 * tssa, k * tssa * 16 * M, ranks, 1)
    loss_calls = math.ceil(M * model.vocab_size / ranks * (4 if config.train.dtype == "float32" else 6) / LOGITS_BYTES)
    yield Sending("loss", "all-gather", k * loss_calls, k * 8 * M, ranks, 1)
    yield Sending("norms, positions", "all-reduce", k * whole, k * 4 * (parts.positions + parts.scales), ranks, 1)


def _of_sequence_ranks(config: PlanConfig) -> Iterator[Sending]:
    """Statistics of T layers, 8·(2C + H) bytes a row whatever the length, and a tile; keys and values of A layers.
    In the forward both are sent again for the tiles that are read twice."""
    parallel, model, k = config.parallel, config.model, config.micro_batches
    ranks, tensor, layers = parallel.sequence, parallel.tensor, layers_by_letter(model)
    rows = 1 if config.data.packing == "best-fit" else config.train.micro_batch_sequences
    statistics = 4 * (2 * model.width + model.heads) / tensor * rows  # one way
    ways = 2 * tiles(config) + (0 if config.train.truncate_tokens else tiles(config) - 1)
    calls = 2 * ways * k * layers["T"]
    yield Sending("sequence statistics", "all-gather", calls, k * layers["T"] * ways * statistics, ranks, tensor)
    if layers["A"]:
        key_value, calls = 2 * tokens_here(config) * model.width / tensor, k * layers["A"] * tiles(config)
        e, times = ELEMENT_BYTES[config.train.dtype], k * layers["A"]
        again = 1 + read_twice(config)
        yield Sending("keys and values", "all-gather", calls * again, times * again * e * key_value, ranks, tensor)
        yield Sending("their gradients", "reduce-scatter", calls, times * 4 * key_value * ranks, ranks, tensor)


def host_bytes(config: PlanConfig) -> float:
    """Of the node with rank 0: the copy that an asynchronous checkpoint is written from, and what is offloaded."""
    copy = CHECKPOINT_BYTES * parameters(config.model).total if config.checkpoint.asynchronous else 0
    if config.parallel.offload == "none":
        return copy
    _, optimizer = weights_and_optimizer(config, config.cluster.ranks)
    part = numbers_here(config) * config.parallel.tensor / config.cluster.ranks
    weights = ELEMENT_BYTES[config.train.dtype] * part if config.parallel.offload == "all" else 0
    return copy + config.cluster.gpus_per_node * (optimizer + 4 * part + weights)


def gpu_bytes(config: PlanConfig) -> float:
    """Of a GPU at its fullest, with what is reserved."""
    return fullest(config, config.cluster.ranks).total + config.cluster.reserved_gb * 1e9


def with_tile_size(config: PlanConfig) -> PlanConfig:
    """With a number for memory.tile_tokens = auto. Raises ConfigError when no tile fits."""
    return _in_tiles(config) if config.memory.tile_tokens == "auto" else config


def _in_tiles(config: PlanConfig) -> PlanConfig:
    cluster = config.cluster
    return largest_tile(config, cluster.ranks, (cluster.memory_gb - cluster.reserved_gb) * 1e9)


def what_does_not_fit(config: PlanConfig) -> str | None:
    """What is too large, and the settings nearest to these that fit; None: all fits."""
    cluster = config.cluster
    if gpu_bytes(config) > cluster.memory_gb * 1e9:
        needed = f"a GPU would need {gpu_bytes(config) / 1e9:.1f} GB of cluster.memory_gb {cluster.memory_gb:g}"
        for changes, other in alternatives(config):
            if gpu_bytes(other) <= cluster.memory_gb * 1e9:
                return f"{needed}; what fits: {changes} ({gpu_bytes(other) / 1e9:.1f} GB)"
        return (
            f"{needed}, and no micro-batch, ZeRO stage, recomputation, tiles, sequence or tensor ranks of these "
            f"{cluster.ranks} GPUs fit: plan for more of them or larger ones"
        )
    if host_bytes(config) > cluster.host_memory_gb * 1e9:
        needed = f"{host_bytes(config) / 1e9:.0f} GB of cluster.host_memory_gb {cluster.host_memory_gb:g}"
        return f"a node would need {needed}: set checkpoint.asynchronous=false or parallel.offload=none"
    return None


def require_even_shares(config: PlanConfig) -> None:
    """Raises ConfigError when ranks or batch cannot be shared out evenly, with settings that can."""
    try:
        config.accumulation(config.cluster.ranks)
    except ConfigError as error:
        ways = [changes for changes, _ in alternatives(config)][:1]
        parallel, batch = config.parallel, config.train.batch_sequences
        if config.cluster.ranks % (parallel.tensor * parallel.sequence) == 0:
            data_ranks = parallel.data_ranks(config.cluster.ranks)
            larger = {"batch_sequences": -(-batch // data_ranks) * data_ranks, "micro_batch_sequences": 1}
            if larger["batch_sequences"] != batch and _can_be_shared(_changed(config, train=larger)):
                ways.append(" ".join(f"train.{key}={value}" for key, value in larger.items()))
        raise ConfigError(f"{error}{'; what can: ' * bool(ways)}{', or '.join(ways)}") from None


def alternatives(config: PlanConfig) -> Iterator[tuple[str, PlanConfig]]:
    """Settings as overrides, those that cost little first: the micro-batch is made smaller, then the ZeRO stage is
    raised, then blocks are computed again or rows cut into tiles, then sequence ranks are added, then tensor ranks."""
    train, parallel, ranks = config.train, config.parallel, config.cluster.ranks
    tensors = [n for n in range(parallel.tensor, config.cluster.gpus_per_node + 1) if n % parallel.tensor == 0]
    sequences = [n for n in range(parallel.sequence, train.sequence_tokens + 1) if n % parallel.sequence == 0]
    for tensor, sequence in ((t, s) for t in tensors for s in sequences if ranks % (t * s) == 0):
        if obstacle_to_tensor_ranks(config.model, tensor):
            continue
        tiled = tiles(config) > 1
        for stage in range(parallel.zero_stage, 3 if tiled else 4):
            for micro_batch in range(train.micro_batch_sequences, 0, -1):
                other = _changed(
                    config,
                    train={"micro_batch_sequences": micro_batch},
                    parallel={"zero_stage": stage, "sequence": sequence, "tensor": tensor},
                )
                changes = [line.split(": ")[0] for line in differences(config, other)]
                if changes and _can_be_shared(other):
                    new = dict(leaves(other.model_dump()))
                    yield " ".join(f"{path}={new[path]}" for path in changes), other
        if (tensor, sequence) != (parallel.tensor, parallel.sequence):
            continue
        if config.memory.recompute == "nothing" and _can_be_shared(config):
            yield "memory.recompute=blocks", _changed(config, memory={"recompute": "blocks"})
        if not tiled and parallel.zero_stage < 3:
            with suppress(ConfigError):
                if config.model.obstacle_to_tiles is None and _can_be_shared(config):
                    other = _in_tiles(config)
                    yield f"memory.tile_tokens={other.memory.tile_tokens}", other


def _changed(config: PlanConfig, **sections: dict[str, Any]) -> PlanConfig:
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    )


def _can_be_shared(config: PlanConfig) -> bool:
    try:
        return config.micro_batches > 0
    except ConfigError:
        return False
