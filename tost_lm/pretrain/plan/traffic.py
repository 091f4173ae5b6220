"""The collectives of a rank in a step, and how often it computes what, from the settings alone."""

import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Literal, NamedTuple

from tost_lm.mixers.spec import gathered_tokens
from tost_lm.model.flops import mlp_weights
from tost_lm.pretrain.plan.activations import ELEMENT_BYTES, costs_of, load_of, micro_batch_tokens
from tost_lm.pretrain.plan.groups import Group, groups_of, replicated_numbers, shards, stage_of
from tost_lm.pretrain.plan.memory import logit_tiles
from tost_lm.pretrain.plan.settings import ClusterConfig, PlanConfig
from tost_lm.pretrain.settings import PretrainConfig
from tost_lm.sizes import BUCKET_ELEMENTS, rows_of_groups

TENSORS_PER_LAYER = 10
"""Parameters of a layer, about."""


def tiles(config: PlanConfig) -> int:
    """Tiles of a row."""
    return math.ceil(config.row_tokens / config.tile_tokens)


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
        others = self.ranks - 1
        factors = {
            "all-gather": others,
            "reduce-scatter": others / self.ranks,
            "all-reduce": 2 * others / self.ranks,
            "all-to-all": others / self.ranks,
        }
        return self.input_bytes * factors[self.kind]

    def seconds(self, cluster: ClusterConfig) -> float:
        """Duration. A ring crosses each node boundary once, and the parallel groups of a node divide its network. In an
        all-to-all, all ranks of a node do."""
        rate = cluster.link_gb_s
        if self.ranks * self.stride > cluster.gpus_per_node:
            senders = cluster.gpus_per_node if self.kind == "all-to-all" else self.stride
            rate = min(rate, cluster.network_gb_s / min(senders, cluster.gpus_per_node))
        return self.sent_bytes / (rate * 1e9 * cluster.achieved_bandwidth) + self.calls * cluster.latency_us * 1e-6


def collectives(config: PlanConfig) -> list[Collectives]:
    """All collectives of a rank in a step. Raises ConfigError when the batch is not divisible by the ranks."""
    found = [*_of_tensor_ranks(config), *_of_sequence_ranks(config)]
    return [*collectives_of_replicas(config), *_used(found)]


def collectives_of_replicas(config: PlanConfig) -> list[Collectives]:
    """Those over data × sequence ranks; raises as `collectives`."""
    return _used(_of_replicas(config))


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
    calls_of_softmax, bytes_of_softmax = 0, 0.0
    for spec, _ in model.mixers:
        if of_layer := costs_of(config, spec).head_softmax:
            calls_of_softmax += 2 * model.letters.count(spec.letter)
            bytes_of_softmax += model.letters.count(spec.letter) * of_layer
    # Of mixers, embedding and head, which see whole rows, and of MLPs, which see tiles.
    whole_rows, in_tiles = mixers + 2 * layers + 2, mlps + 2 * layers
    calls, sizes = whole_rows + per_row * in_tiles, (whole_rows + in_tiles) * stream / ranks
    yield Collectives("residual stream", "all-gather", k * calls, k * sizes, ranks, 1)
    whole_rows, in_tiles = mixers + layers + 2, mlps + layers - mlps_without_output(config)
    calls, sizes = whole_rows + per_row * in_tiles, (whole_rows + in_tiles) * stream
    yield Collectives("residual stream", "reduce-scatter", k * calls, k * sizes, ranks, 1)
    yield Collectives("softmax over heads", "all-gather", k * calls_of_softmax, k * bytes_of_softmax, ranks, 1)
    yield Collectives("loss", "all-gather", k * logit_tiles(config).calls, k * 8 * M, ranks, 1)
    replicated = replicated_numbers(config, config.cluster.ranks)
    yield Collectives("norms, positions", "all-reduce", 1, 4 * replicated, ranks, 1)


def sent_again(config: PlanConfig, *, shares_tiles: bool = False) -> bool:
    """Whether a mixer also receives again in the backward: `keep_received` does not see into graphs, which mixers that
    share their state between tiles are outside of."""
    return is_computed_again(config) and config.train.compile and not shares_tiles


def _of_sequence_ranks(config: PlanConfig) -> Iterator[Collectives]:
    """Statistics and states of mixers, in one or two exchanges a layer and pass for any length; tokens that are
    exchanged for heads, or gathered keys and values (with a window of a shard's last tokens).

    The forward sends all again for tiles that are computed twice. In all-to-alls, a rank sends its row in one, and the
    results for other ranks in a second one. Maps of states are gathered in groups instead, then between groups.
    """
    parallel, model, k = config.parallel, config.model, config.micro_batches
    ranks, tensor = parallel.sequence, parallel.tensor
    loads = [load_of(config, spec) for spec, _ in model.mixers]
    used = [
        (model.letters.count(spec.letter), spec.costs(load), spec.kept_tokens(shape))
        for (spec, shape), load in zip(model.mixers, loads, strict=True)
    ]
    rows = 1 if config.data.packing == "best-fit" else config.train.micro_batch_size
    backwards, again = tiles(config), sent_again(config)
    passes = tiles(config) * (1 + again) + tiles(config) - 1
    calls, statistics, summed, row = 0.0, 0.0, 0.0, 0.0
    for layers, costs, _ in used:
        forward, backward = costs.exchanged
        if forward:
            calls += costs.exchanges * k * layers * (passes + backwards)
            statistics += k * rows * layers * (passes * forward + backwards * backward) / tensor
        # States between tiles: forward, again in the second forward, and backward.
        if costs.summed:
            times = (tiles(config) - 1) * (3 + again) * k * layers
            summed += times * (costs.exchanges if costs.grouped[0] else 1)
            row += rows * times * costs.summed / tensor
    if loads[0].gathers:
        yield Collectives("sequence statistics", "all-gather", calls, statistics, ranks, tensor)
        yield Collectives("states after tiles", "all-gather", summed, row, ranks, tensor)
    else:
        sent = loads[0].exchanged_rows * statistics
        yield Collectives("sequence statistics", "all-to-all", 2 * calls, sent, ranks, tensor)
        yield Collectives("states after tiles", "all-to-all", 2 * summed, 2 * row, ranks, tensor)
    for layers, costs, _ in used:
        forward, backward = costs.grouped
        calls = 2 * costs.exchanges * k * layers * (passes + backwards) if forward else 0  # at two levels
        sent = rows * k * layers * (passes * forward + backwards * backward) / tensor * rows_of_groups(ranks)
        yield Collectives("maps of states", "all-to-all", calls, sent, ranks, tensor)
    for layers, costs, kept in used:
        recomputed = sent_again(config, shares_tiles=kept is None and tiles(config) > 1)
        forwards = 1 + recomputed + fraction_computed_twice(config)
        sent = k * layers * micro_batch_tokens(config) * (forwards + 1) * costs.dealt / tensor
        in_forwards = tiles(config) * (1 + recomputed) + tiles(config) - 1
        calls = 2 * k * layers * (in_forwards + backwards) if costs.dealt else 0
        yield Collectives("heads of attention", "all-to-all", calls, sent, ranks, tensor)
    starts = range(0, config.row_tokens, config.tile_tokens)
    sizes = [min(config.tile_tokens, config.row_tokens - start) for start in starts]
    for layers, costs, kept in used:
        of_tiles = [gathered_tokens(kept, size / ranks) for size in sizes] if costs.gathered_channels else []
        in_second = fraction_computed_twice(config) > 0
        e, calls = ELEMENT_BYTES[config.train.dtype], k * layers
        channels = calls * micro_batch_tokens(config) * ranks / config.row_tokens * costs.gathered_channels / tensor
        sent = channels * ((1 + again) * sum(of_tiles) + in_second * sum(of_tiles[:-1]))
        gathers = calls * ((1 + again) * len(of_tiles) + in_second * len(of_tiles[:-1]))
        scattered, scatters = channels * sum(of_tiles), calls * len(of_tiles)
        yield Collectives("keys and values", "all-gather", gathers, e * sent, ranks, tensor)
        yield Collectives("their gradients", "reduce-scatter", scatters, 4 * scattered * ranks, ranks, tensor)
