"""The collectives of a rank in a step, and how often it computes what, from the settings alone."""

import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Literal, NamedTuple

from tost_lm.mixers.spec import gathered_tokens
from tost_lm.model.flops import mlp_weights
from tost_lm.pretrain.plan.activations import ELEMENT_BYTES, load_of, micro_batch_tokens, over_layers, tiles
from tost_lm.pretrain.plan.groups import Group, groups_of, replicated_numbers, shards, stage_of
from tost_lm.pretrain.plan.memory import logit_tiles, states_after_tile
from tost_lm.pretrain.plan.settings import ClusterConfig, PlanConfig
from tost_lm.pretrain.settings import PretrainConfig
from tost_lm.sizes import BUCKET_ELEMENTS, rows_of_groups

TENSORS_PER_LAYER = 10
"""Parameters of a layer, about."""
PROTOCOLS = {
    "ring": ((6.6, 0.6, 2.7, 0.25), (14.0, 1.9, 4.0, 0.92), (8.4, 3.4, 14.0, 1.0)),
    "tree": ((6.8, 0.6, 5.0, 0.24), (14.0, 1.25, 8.5, 0.86), (0.0, 28.0, 28.0, 0.92)),
}
"""Of LL, LL128 and Simple, by the order of the ranks: µs of a call, of a step over NVLink and of one to another node,
and the fraction of the bandwidth: NCCL chooses by them in its own model of time (src/graph/tuning.cc of 2.20.3)."""
POSTED_US = 1.0
"""Time in which a host posts a message to another node, by the same."""


def fraction_computed_twice(config: PlanConfig) -> float:
    """Fraction of tokens with a second forward, which computes the states between tiles: all tiles but the last."""
    return (tiles(config) - 1) * config.tile_tokens / config.row_tokens


def is_computed_again(config: PretrainConfig) -> bool:
    """Whether the backward of a block computes it again."""
    return config.memory.activation_checkpointing == "full"


def mixer_forwards(config: PlanConfig) -> float:
    """Forwards of a mixer per token."""
    return 1 + is_computed_again(config) + fraction_computed_twice(config)


def mlp_tiles(config: PlanConfig) -> int:
    """MLP tiles of a row in a rank's residual stream."""
    tokens = math.ceil(config.tile_tokens / config.parallel.sequence / config.parallel.tensor)
    return math.ceil(tokens / (config.memory.mlp_tile_tokens or tokens))


def mlp_forwards(config: PlanConfig) -> float:
    """Forwards of an MLP per token, on average. MLP tiles of equal size are recomputed one by one; a recomputed block
    stops before its last MLP tile."""
    again = is_computed_again(config)
    once = 1 + again + fraction_computed_twice(config)
    return once + 1 - again / mlp_tiles(config) if config.memory.mlp_tile_tokens else once


def mlps_without_output(config: PlanConfig) -> int:
    """Layers whose MLP is computed again without its output.

    Without LayerScale no gradient needs a branch's output, so recomputation that ends with the MLP stops before the
    last product. Graphs are planned whole.
    """
    if config.model.layer_scale or config.train.compile:
        return 0
    return config.model.layers if config.memory.mlp_tile_tokens or is_computed_again(config) else 0


def recomputed_flops(config: PlanConfig) -> tuple[float, float]:
    """FLOPs per token of products and of attention that are recomputed. Tensor ranks compute a product before they
    store its input."""
    model, seq_len, products, attention = config.model, config.train.seq_len, 0.0, 0.0
    for spec, shape in model.mixers:
        layers, again = model.letters.count(spec.letter), mixer_forwards(config) - 1
        attention += layers * again * spec.flops(shape, seq_len)[0].forward
        products += layers * 2 * (again * spec.weights(shape) + (mlp_forwards(config) - 1) * mlp_weights(model))
    if config.parallel.tensor == 1:
        products -= 2 * model.width * mlps_without_output(config) * model.mlp_width
    return products, attention


Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]


class Collectives(NamedTuple):
    """The collectives of one kind that a rank calls in a step."""

    content: str
    kind: Kind
    calls: float
    input_bytes: float
    """Sum over these calls on this rank."""
    ranks: int
    """Size of the group."""
    stride: int
    """Difference between consecutive ranks of the group."""
    during: Literal["forward", "backward"] | None = None
    """What is computed at the same time; None: the ranks wait."""
    passes: float = 1.0
    """Fraction of the step's forwards or backwards during which they run."""

    @property
    def sent_bytes(self) -> float:
        """Bytes that leave the rank, in a ring (all-to-all: directly to each rank)."""
        sent = self.input_bytes * (self.ranks - 1) * (2 if self.kind == "all-reduce" else 1)
        return sent if self.kind == "all-gather" else sent / self.ranks

    def seconds(self, cluster: ClusterConfig) -> float:
        """Duration, by the order and protocol that NCCL would choose.

        A ring crosses each node boundary once, and the parallel groups of a node divide its network. In an all-to-all,
        all ranks of a node do, and each posts its messages to other nodes one by one.
        """
        on_node = min(self.ranks, max(1, cluster.gpus_per_node // self.stride))
        nodes, rate, senders, posted = math.ceil(self.ranks / on_node), cluster.link_gb_s, self.stride, 0.0
        # Steps within nodes, and between them; an all-reduce takes them there and back.
        steps, times = {"ring": (self.ranks - nodes, nodes - 1.0)}, 2 if self.kind == "all-reduce" else 1
        if self.kind == "all-reduce":
            steps["tree"] = on_node - 1, math.log2(nodes)
        if self.kind == "all-to-all":
            steps, senders = {"ring": (int(nodes == 1), float(nodes > 1))}, cluster.gpus_per_node
            posted = POSTED_US * (self.ranks - on_node)
        if nodes > 1:
            rate = min(rate, cluster.network_gb_s / min(senders, cluster.gpus_per_node))
        sent = self.sent_bytes / (rate * 1e9 * cluster.achieved_bandwidth)
        return min(
            sent / fraction + self.calls * 1e-6 * (call + posted + times * (near * within + far * between))
            for order, (within, between) in steps.items()
            for call, near, far, fraction in PROTOCOLS[order]
        )


def collectives(config: PlanConfig) -> list[Collectives]:
    """All collectives of a rank in a step. Raises ConfigError when the batch is not divisible by the ranks."""
    return [*collectives_of_replicas(config), *_used([*_of_tensor_ranks(config), *_of_sequence_ranks(config)])]


def collectives_of_replicas(config: PlanConfig) -> list[Collectives]:
    """Those over data × sequence ranks; raises as `collectives`."""
    return _used(_of_replicas(config))


def copied_bytes(config: PlanConfig) -> float:
    """Bytes of a step that a rank copies between its GPU and its host.

    Offloaded weights are copied for each gather and gradients after each reduction, in float32. States between tiles on
    the host are copied there and back, and those that later tiles share for each forward and backward of these, with
    their gradients in float32.
    """
    total, e, n = 0.0, ELEMENT_BYTES[config.train.dtype], tiles(config)
    if config.parallel.offload != "none":
        divided = shards(config, config.cluster.ranks)
        factors = {"all-gather": 4 / e, "reduce-scatter": 1 / divided}
        total = sum(one.input_bytes * factors.get(one.kind, 0) for one in _of_replicas(config))
    if config.memory.offload_tile_states:
        # Of tiles with earlier ones: in the first pass all but the last, and in the second one.
        first, second = (n - 1) * (n - 2) / 2, n * (n - 1) / 2
        shared = n - 1 + first + second * (2 + is_computed_again(config) + 4 / e)
        times = config.micro_batches
        total += times * sum(size * (shared if grows else 2 * (n - 1)) for grows, size in states_after_tile(config))
    return total


def _used(found: Iterable[Collectives]) -> list[Collectives]:
    return [one for one in found if one.ranks > 1 and one.calls]


def _of_replicas(config: PlanConfig) -> Iterator[Collectives]:
    """Weights and gradients over data × sequence ranks (`tost_lm/parallel/fsdp.py`).

    Gradients are sent in float32: once in a step at stages 0 and 1, after each backward at stages 2 and 3, and between
    copies of the shards once in a step. Stages 1 and 2 gather weights once in a step. Stage 3 gathers those of blocks
    for each forward and backward, an untied embedding for each forward, all others for each tile.
    """
    ranks, tensor, stage = config.cluster.ranks, config.parallel.tensor, stage_of(config, config.cluster.ranks)
    groups, replicas, divided = groups_of(config, ranks), ranks // tensor, shards(config, ranks)
    if stage == 0:
        n = groups.total.numbers
        yield Collectives("gradients", "all-reduce", math.ceil(n / BUCKET_ELEMENTS), 4 * n, replicas, tensor)
        return
    backwards = config.micro_batches * tiles(config)
    forwards = 2 * backwards - config.micro_batches
    outside = [(backwards, groups.root), (forwards, groups.embedding), (backwards, groups.head)]
    in_forward, in_backward = ([(times, group) for group in groups.buckets] for times in (forwards, backwards))
    if stage < 3:
        outside, in_forward, in_backward = [(1, groups.root)], [(1, group) for group in groups.buckets], []
    gathers = partial(_sent, "all-gather", ELEMENT_BYTES[config.train.dtype] / divided, divided, tensor)
    elsewhere = " outside the blocks" if groups.buckets else ""
    yield gathers(f"weights{elsewhere}", outside)
    yield gathers("weights of blocks, forward", in_forward)._replace(
        during="forward", passes=1 if stage == 3 else 1 / forwards
    )
    yield gathers("weights of blocks, backward", in_backward)._replace(during="backward")
    reduces = partial(_sent, "reduce-scatter", 4, divided, tensor)
    sums = partial(_sent, "all-reduce", 4 / divided, replicas // divided, tensor * divided)
    for send, times in ((reduces, 1 if stage == 1 else backwards), (sums, 1)):
        yield send(f"gradients{elsewhere}", [(times, group) for group in (groups.root, groups.embedding, groups.head)])
        of_blocks = send("gradients of blocks", [(times, group) for group in groups.buckets])
        yield of_blocks._replace(during="backward", passes=times / backwards)


def _sent(
    kind: Kind, element_bytes: float, ranks: int, stride: int, content: str, groups: list[tuple[int, Group]]
) -> Collectives:
    """Of each group, so many times."""
    calls = sum(times for times, group in groups if group.numbers)
    padded = sum(times * group.padded for times, group in groups)
    return Collectives(content, kind, calls, element_bytes * padded, ranks, stride)


def _of_tensor_ranks(config: PlanConfig) -> Iterator[Collectives]:
    """Megatron-Core's collectives, with its sequence parallelism, and our own.

    The residual stream is gathered before each pair of linear layers and scattered after it. The backward gathers it
    once more for the weights' gradients. A recomputed block or MLP repeats its collectives. Our own send one number per
    token for the softmax over heads, three in its backward, two for the loss, and once in a step the
    gradients of replicated parameters.
    """
    model, ranks, k, M = config.model, config.parallel.tensor, config.micro_batches, micro_batch_tokens(config)
    stream = ELEMENT_BYTES[config.train.dtype] * M * model.width
    layers = model.layers
    mixers, mlps, per_row = layers * mixer_forwards(config), layers * mlp_forwards(config), mlp_tiles(config)
    softmax_bytes = over_layers(config, lambda spec, costs: costs.head_softmax)
    softmaxes = over_layers(config, lambda spec, costs: 2 * (costs.head_softmax > 0))
    # Of mixers, embedding and head, which see whole rows, and of MLPs, which see tiles.
    whole_rows, in_tiles = mixers + 2 * layers + 2, mlps + 2 * layers
    calls, sizes = whole_rows + per_row * in_tiles, (whole_rows + in_tiles) * stream / ranks
    yield Collectives("residual stream", "all-gather", k * calls, k * sizes, ranks, 1)
    whole_rows, in_tiles = mixers + layers + 2, mlps + layers - mlps_without_output(config)
    calls, sizes = whole_rows + per_row * in_tiles, (whole_rows + in_tiles) * stream
    yield Collectives("residual stream", "reduce-scatter", k * calls, k * sizes, ranks, 1)
    yield Collectives("softmax over heads", "all-gather", k * softmaxes, k * softmax_bytes, ranks, 1)
    yield Collectives("loss", "all-gather", k * logit_tiles(config).calls, k * 8 * M, ranks, 1)
    replicated = replicated_numbers(config, config.cluster.ranks)
    yield Collectives("norms, positions", "all-reduce", 1, 4 * replicated, ranks, 1)


def _of_sequence_ranks(config: PlanConfig) -> Iterator[Collectives]:
    """Statistics and states of mixers, in one or two exchanges a layer and pass for any length; tokens that are
    exchanged for heads, or gathered keys and values (with a window of a shard's last tokens).

    The forward sends all again for tiles that are computed twice. In all-to-alls, a rank sends its row in one, and the
    results for other ranks in a second one. Maps of states are gathered in groups instead, then between groups.
    """
    tensor, n, e = config.parallel.tensor, tiles(config), ELEMENT_BYTES[config.train.dtype]
    send = partial(Collectives, ranks=config.parallel.sequence, stride=tensor)
    tokens, twice = micro_batch_tokens(config), fraction_computed_twice(config)
    rows = 1 if config.data.packing == "best-fit" else config.train.micro_batch_size
    starts = range(0, config.row_tokens, config.tile_tokens)
    sizes = [min(config.tile_tokens, config.row_tokens - start) / config.parallel.sequence for start in starts]
    for spec, shape in config.model.mixers:
        load, kept = load_of(config, spec), spec.kept_tokens(shape)
        costs, layers = spec.costs(load), config.micro_batches * config.model.letters.count(spec.letter)
        each, forwards, in_groups = rows * layers / tensor, 2 * n - 1, costs.grouped[0] > 0

        calls = costs.exchanges * layers * (forwards + n)
        kind, at_once, copies = ("all-gather", 1, 1) if load.gathers else ("all-to-all", 2, load.exchanged_rows)
        sent = copies * each * (forwards * costs.exchanged[0] + n * costs.exchanged[1])
        yield send("sequence statistics", kind, at_once * calls * (costs.exchanged[0] > 0), sent)
        # States between tiles: forward, again in the second forward, and backward.
        times = at_once * (n - 1) * 3 * (costs.summed > 0)
        summed = times * layers * (costs.exchanges if in_groups else 1)
        yield send("states after tiles", kind, summed, times * each * costs.summed)
        sent = rows_of_groups(load.sequence) * each * (forwards * costs.grouped[0] + n * costs.grouped[1])
        yield send("maps of states", "all-to-all", 2 * calls * in_groups, sent)  # at two levels

        calls = 2 * layers * (3 * n - 1) * (costs.dealt > 0)
        sent = layers * tokens * (2 + twice) * costs.dealt / tensor
        yield send("heads of attention", "all-to-all", calls, sent)

        of_tiles = [gathered_tokens(kept, size) for size in sizes] if costs.gathered_channels else []
        passes = [(1, of_tiles), (twice > 0, of_tiles[:-1])]
        channels = layers * tokens / sum(sizes) * costs.gathered_channels / tensor
        calls = layers * sum(times * len(some) for times, some in passes)
        sent = e * channels * sum(times * sum(some) for times, some in passes)
        yield send("keys and values", "all-gather", calls, sent)
        sent = 4 * channels * sum(of_tiles) * load.sequence
        yield send("their gradients", "reduce-scatter", layers * len(of_tiles), sent)
