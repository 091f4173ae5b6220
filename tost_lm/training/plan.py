"""What a pre-training run will take on a cluster, from the settings alone: work, traffic, time, and what would fit.

Times are sums: nothing is taken to overlap. How near the hardware comes to its published figures is a setting
(`cluster.achieved_flops`, `cluster.achieved_bandwidth`), not a measurement.
"""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from tost_lm.config import differences
from tost_lm.config.section import leaves
from tost_lm.errors import ConfigError
from tost_lm.model.flops import FlopsPerToken, flops_per_token, layers_by_letter, parameters, peak_flops
from tost_lm.parallel.config import obstacle_to_tensor_ranks
from tost_lm.training.plan_config import ClusterConfig, PlanConfig
from tost_lm.training.plan_memory import (
    BUCKET,
    ELEMENT_BYTES,
    fullest,
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
    products = (flops.products.total + flops.attention.total) * tokens / (peak(config) * cluster.achieved_flops)
    operator = operator_bytes_a_token(config) * tokens / bandwidth
    elementwise = elementwise_bytes_a_token(config) * tokens / bandwidth
    launches = config.micro_batches * config.model.layers * OPERATIONS * cluster.launch_us * 1e-6
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


def operator_bytes_a_token(config: PlanConfig) -> float:
    """What the Triton kernels read and write, forward and backward (`tost_lm.ops.triton`)."""
    e, C, H = ELEMENT_BYTES[config.train.dtype], config.model.width, config.model.heads
    return layers_by_letter(config.model)["T"] * (4 * e * C + C + 8 * H + 7 * e * C + 1.75 * C + 20 * H)


def elementwise_bytes_a_token(config: PlanConfig) -> float:
    """What runs outside products and operator reads and writes, an eager operation at a time.

    A layer, in tensors of e·C: norms 4 and 6, GELU 8 and 12, residual sums 6 and 6, LayerScales 4 and 12. The loss, in
    V: float32 log-softmax 8, backward 4 + 12, and to and from bfloat16 12.
    """
    e, model = ELEMENT_BYTES[config.train.dtype], config.model
    scales = 16 if model.layer_scale else 0
    return model.layers * (42 + scales) * e * model.width + (24 if e == 4 else 36) * model.vocab_size


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
    scattered after it, gathered once more in the backward for the weights' gradients; three sums of the loss. Ours: one
    number a token for the softmax over heads, and three backward; gradients of what every rank has whole."""
    model, ranks, k, M = config.model, config.parallel.tensor, config.micro_batches, tokens_here(config)
    stream = ELEMENT_BYTES[config.train.dtype] * M * model.width
    layers, tssa, parts = model.layers, layers_by_letter(model)["T"], parameters(model)
    gathers, scatters = 6 * layers + 3, 4 * layers + 2  # the head: 2 and 1; the embedding: 1 and 1
    whole = (4 if model.layer_scale else 2) * layers + 1 + (parts.positions > 0)
    yield Sending("residual stream", "all-gather", k * gathers, k * gathers * stream / ranks, ranks, 1)
    yield Sending("residual stream", "reduce-scatter", k * scatters, k * scatters * stream, ranks, 1)
    yield Sending("softmax over heads", "all-gather", k * 2 * tssa, k * tssa * 16 * M, ranks, 1)
    yield Sending("loss", "all-reduce", 3 * k, 3 * k * 4 * M, ranks, 1)
    yield Sending("norms, positions", "all-reduce", k * whole, k * 4 * (parts.positions + parts.scales), ranks, 1)


def _of_sequence_ranks(config: PlanConfig) -> Iterator[Sending]:
    """Statistics of T layers, 8·(2C + H) bytes a row whatever the length; keys and values of A layers."""
    parallel, model, k = config.parallel, config.model, config.micro_batches
    ranks, tensor, layers = parallel.sequence, parallel.tensor, layers_by_letter(model)
    rows = 1 if config.data.packing == "best-fit" else config.train.micro_batch_sequences
    statistics = 8 * (2 * model.width + model.heads) / tensor * rows
    yield Sending("sequence statistics", "all-gather", 4 * k * layers["T"], k * layers["T"] * statistics, ranks, tensor)
    if layers["A"]:
        key_value = 2 * tokens_here(config) * model.width / tensor
        e = ELEMENT_BYTES[config.train.dtype]
        yield Sending("keys and values", "all-gather", k * layers["A"], k * layers["A"] * e * key_value, ranks, tensor)
        yield Sending(
            "their gradients", "reduce-scatter", k * layers["A"], k * layers["A"] * 4 * key_value * ranks, ranks, tensor
        )


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


def what_does_not_fit(config: PlanConfig) -> str | None:
    """What is too large, and the settings nearest to these that fit; None: all fits."""
    cluster = config.cluster
    if gpu_bytes(config) > cluster.memory_gb * 1e9:
        needed = f"a GPU would need {gpu_bytes(config) / 1e9:.1f} GB of cluster.memory_gb {cluster.memory_gb:g}"
        for changes, other in alternatives(config):
            if gpu_bytes(other) <= cluster.memory_gb * 1e9:
                return f"{needed}; what fits: {changes} ({gpu_bytes(other) / 1e9:.1f} GB)"
        return (
            f"{needed}, and no micro-batch, ZeRO stage, sequence or tensor ranks of these {cluster.ranks} GPUs fit: "
            "plan for more of them or larger ones"
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
    raised, then sequence ranks are added, then tensor ranks."""
    train, parallel, ranks = config.train, config.parallel, config.cluster.ranks
    tensors = [n for n in range(parallel.tensor, config.cluster.gpus_per_node + 1) if n % parallel.tensor == 0]
    sequences = [n for n in range(parallel.sequence, train.sequence_tokens + 1) if n % parallel.sequence == 0]
    for tensor, sequence in ((t, s) for t in tensors for s in sequences if ranks % (t * s) == 0):
        if obstacle_to_tensor_ranks(config.model, tensor):
            continue
        for stage in range(parallel.zero_stage, 4):
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


def _changed(config: PlanConfig, **sections: dict[str, int]) -> PlanConfig:
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    )


def _can_be_shared(config: PlanConfig) -> bool:
    try:
        return config.micro_batches > 0
    except ConfigError:
        return False
