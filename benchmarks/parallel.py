"""Traffic between ranks, and weak scaling.

    python -m benchmarks.parallel
    python -m benchmarks.parallel "scaling.ranks=[1, 2]" "traffic.ranks=[16]" traffic.count_up_to=1024

Traffic: bytes that one rank sends and receives in a TSSA layer and a training step, when ranks share the tokens of a
sequence, beside published methods. Ours is counted in torch's dispatcher on real gloo ranks up to traffic.count_up_to
tokens; everything else follows from the formulas printed with the table.

Weak scaling: training steps of a small model through DeepSpeed's ZeRO stage 1 on 1, 2, … gloo ranks with one thread and
equal tokens per rank. They take turns with the same ranks each training its own model without communication, which
bounds what the machine can do. With the defaults it takes about 5 minutes on 2 busy CPU cores. Output: two tables, and
all values in results/benchmarks/.
"""

import os
import time
from collections.abc import Callable, Mapping
from statistics import mean, median
from typing import Any, NamedTuple

import torch
from pydantic import Field, PositiveInt
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import measure
from benchmarks.engine import mesh_of_one
from benchmarks.measure import call_seconds
from tost_lm.command_line import run_program
from tost_lm.config import Section, validate
from tost_lm.data.prefetch import MicroBatch
from tost_lm.errors import ConfigError
from tost_lm.model import ModelConfig, TostLM
from tost_lm.optim.adamw import OPTIMIZER as ADAMW
from tost_lm.optim.settings import OptimConfig
from tost_lm.parallel.apply import even_split, parallelize, shard_of
from tost_lm.parallel.engine import StepSettings
from tost_lm.parallel.fsdp import build_engine
from tost_lm.parallel.mesh import Mesh, World, build_mesh, max_over_ranks, start_world
from tost_lm.parallel.settings import ParallelConfig, obstacle_to_tensor_ranks
from tost_lm.pretrain.step import train_step
from tost_lm.pretrain.tiled import TiledLM, tile
from tost_lm.sizes import ALL_GATHER_RANKS
from tost_lm.testing import Traffic, run_on_ranks
from tost_lm.torch_internals import FUNCTIONAL_COLLECTIVES

OURS, RING, ULYSSES, LASP2 = "TSSA, tost_lm", "Ring Attention", "DeepSpeed Ulysses", "LASP-2"
NO_AXIS, DATA, SEQUENCE, TENSOR = "none", "data", "sequence", "tensor"


class TrafficConfig(Section):
    """The layer whose traffic is counted: one sequence on several ranks; the defaults are those of tost-base."""

    tokens: list[PositiveInt] = Field(default=[1024, 16384, 65536, 1048576], min_length=1)
    """Lengths of the sequence."""
    ranks: list[PositiveInt] = Field(default=[4, 8], min_length=1)
    """Numbers of sequence ranks."""
    heads: int = Field(default=12, gt=0)
    """Heads of the layer."""
    channels: int = Field(default=64, gt=0)
    """Channels of a head."""
    count_up_to: int = Field(default=16384, ge=0)
    """Tokens up to which our traffic is counted on real ranks; beyond it follows from the formula."""


class ScalingConfig(measure.ModelShape):
    """The trained model, and the measurements."""

    ranks: list[PositiveInt] = Field(default=[1, 2, 4], min_length=1)
    """Ranks along one axis; the other axes have 1."""
    tokens: int = Field(default=2048, gt=0)
    """Tokens per rank: of its own sequence (data), or of a sequence that grows with the ranks (sequence, tensor)."""
    rounds: int = Field(default=15, gt=0)
    """Timed steps of each kind, in turns."""


class ParallelBenchmarkConfig(Section):
    """Settings of `benchmarks.parallel`."""

    traffic: TrafficConfig = Field(default_factory=TrafficConfig)
    scaling: ScalingConfig = ScalingConfig(layers=2, heads=4, width=256, vocab_size=256)


class Bytes(NamedTuple):
    """Bytes of one rank in one layer and one training step (forward and backward) of one sequence."""

    sent: float
    """Passed to collectives or to a neighbour."""
    received: float
    """From other ranks."""


def run(config: ParallelBenchmarkConfig, device: str) -> tuple[list[dict[str, Any]], str]:
    traffic, scaling = config.traffic, config.scaling
    model = model_settings(scaling.layers, scaling.heads, scaling.width, scaling.vocab_size)
    _require_even_shards(config, validate(ModelConfig, model, "benchmarks.parallel"))
    load = os.getloadavg()[0]
    traffics = traffic_cells(traffic)
    steps = scaling_cells(scaling, model)
    text = (
        f"## Traffic of a layer\n\n{measure.markdown_table([traffic_row(cell) for cell in traffics])}\n\n"
        f"{traffic_notes(traffic)}\n\n"
        f"## Weak scaling\n\n{measure.markdown_table([scaling_row(cell) for cell in steps])}\n\n"
        f"{scaling_notes(scaling, load)}"
    )
    return [*traffics, *steps], text


main = measure.benchmark("parallel", run)


def traffic_by_formula(tokens: int, ranks: int, heads: int, channels: int) -> dict[str, Bytes]:
    """Bytes by method. K, V, q and o are bfloat16, statistics and states float32.

    Sources: ours, `tost_lm.parallel.sequence`; arXiv 2310.01889; 2309.14509; 2502.07563. Assumptions as in
    `traffic_notes`.
    """
    C, others = heads * channels, ranks - 1
    shard = 2 * tokens * C / ranks  # bytes of this rank's keys, or of its values, queries or outputs
    row = 8 * (2 * C + heads)
    ours = Bytes(row, others * row) if ranks <= ALL_GATHER_RANKS else Bytes(2 * row, 2 * row * others / ranks)
    ring = others * (2 + 4) * shard
    ulysses = 2 * 4 * shard
    states = 2 * 4 * heads * channels**2
    return {
        OURS: ours,
        RING: Bytes(ring, ring),
        ULYSSES: Bytes(ulysses, ulysses * others / ranks),
        LASP2: Bytes(states, others * states),
    }


def traffic_cells(traffic: TrafficConfig) -> list[dict[str, Any]]:
    """A cell for each number of ranks and length: `bytes` by method, and whether ours are `counted`."""

    cells = []
    for ranks in traffic.ranks:
        for tokens in sorted(set(traffic.tokens)):
            by_method = traffic_by_formula(tokens, ranks, traffic.heads, traffic.channels)
            counted = tokens <= traffic.count_up_to
            if counted:
                by_formula = by_method[OURS]
                model = model_settings(1, traffic.heads, traffic.heads * traffic.channels, 256)
                sent = bytes_sent_by_a_layer(ranks, tokens, model)
                by_method[OURS] = Bytes(sent, sent / by_formula.sent * by_formula.received)
            cell = {
                "work": "traffic", "ranks": ranks, "tokens": tokens, "heads": traffic.heads, "counted": counted,
                "bytes": {name: moved._asdict() for name, moved in by_method.items()},
            }  # fmt: skip
            print("; ".join(f"{key} {value}" for key, value in traffic_row(cell).items()), flush=True)
            cells.append(cell)
    return cells


def traffic_row(cell: Mapping[str, Any]) -> dict[str, str]:
    marks = {
        OURS: "" if cell["counted"] else "¹",
        ULYSSES: "²" if cell["heads"] % cell["ranks"] else "",
    }
    moved = {
        name: f"{measure.in_units(both['sent'])} / {measure.in_units(both['received'])}{marks.get(name, '')}"
        for name, both in cell["bytes"].items()
    }
    return {"ranks": str(cell["ranks"]), "tokens": f"{cell['tokens']:,}", **moved}


def traffic_notes(traffic: TrafficConfig) -> str:
    C = traffic.heads * traffic.channels
    return (
        "Bytes sent / received by one rank in one layer and one training step (forward and backward, without "
        f"activation checkpointing), one sequence of T tokens on R ranks, H = {traffic.heads} heads of D = "
        f"{traffic.channels} channels, C = {C}. Sent: passed to collectives or to a neighbour. Received: from other "
        "ranks. In a ring "
        "all-gather, a rank forwards as much as it receives.\n\n"
        f"- {OURS}: 4 exchanges of statistics in float32, rows of 4·(C + C+H) bytes forward and as much backward: "
        f"8·(2C+H). Up to {ALL_GATHER_RANKS} ranks, all-gathers: the rows sent, R − 1 times that received. On more "
        "ranks, two all-to-alls for each: twice the rows sent, of which 1/R stays on its rank. Counted in torch's "
        "dispatcher on gloo ranks, the mean over ranks; ¹: the formula, not counted.\n"
        f"- {RING} (Ring Attention with Blockwise Transformers for Near-Infinite Context, arXiv 2310.01889): keys and "
        "values go round R − 1 times forward, they and their gradients R − 1 times backward, in bfloat16: "
        "(R − 1)·6·2·C·T/R. Every block visits every rank, as published.\n"
        f"- {ULYSSES} (System Optimizations for Enabling Training of Extreme Long Sequence Transformer Models, arXiv "
        "2309.14509): all-to-all of q, k, v and o forward and of their gradients backward, in bfloat16: 8·2·C·T/R, of "
        "which 1/R stays on its rank. As published the ranks must divide the heads; ²: they do not, and the figure "
        "assumes even shards.\n"
        f"- {LASP2} (Rethinking Sequence Parallelism for Linear Attention and Its Hybrid, arXiv 2502.07563): one "
        "all-gather of the state D×D of each head forward and one of its gradient backward, assumed float32: 2·4·H·D² "
        "sent, R − 1 times that received.\n\n"
        "The methods compute different attention: Ring Attention and Ulysses softmax attention, LASP-2 linear "
        "attention. Bytes are not time: a TSSA layer waits for four small messages per step (all-to-alls: eight), "
        "LASP-2 for two, and Ring Attention can overlap communication and computation."
    )


def scaling_cells(scaling: ScalingConfig, model: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A cell for each axis and number of ranks; one rank has no axis."""

    cells = []
    for ranks in sorted(set(scaling.ranks)):
        for axis in (DATA, SEQUENCE, TENSOR) if ranks > 1 else (NO_AXIS,):
            turns = time_in_turns(axis, ranks, model, scaling.tokens, scaling.rounds)
            cell = {"work": "scaling", "axis": axis, "ranks": ranks, "tokens_a_rank": scaling.tokens, **turns}
            print("; ".join(f"{key} {value}" for key, value in scaling_row(cell).items()), flush=True)
            cells.append(cell)
    return cells


def scaling_row(cell: Mapping[str, Any]) -> dict[str, str]:
    together, alone = cell["seconds"]["together"], cell["seconds"]["alone"]
    ratio = median(without / with_ for with_, without in zip(together, alone, strict=True))
    crowded = "³" if cell["ranks"] > (os.cpu_count() or 1) else ""
    exchange = cell["exchange_fractions"]
    return {
        "axis": cell["axis"],
        "ranks": f"{cell['ranks']}{crowded}",
        "tokens/s a rank": f"{cell['tokens_a_rank'] / median(together):,.0f}",
        "each alone": f"{cell['tokens_a_rank'] / median(alone):,.0f}",
        "ratio": f"{ratio:.0%}",
        "sent a rank and step": measure.in_units(cell["sent_bytes"]) if cell["ranks"] > 1 else "–",
        "of it in the exchange": measure.in_units(cell["exchange_bytes"]) if exchange else "–",
        "time in the exchange": f"{median(exchange):.1%}" if exchange else "–",
    }


def scaling_notes(scaling: ScalingConfig, load: float) -> str:
    return (
        f"{scaling.layers} TSSA layers, {scaling.heads} heads, width {scaling.width}, vocabulary {scaling.vocab_size}, "
        f"float32, ZeRO stage 1, {scaling.tokens:,} tokens a rank, gloo, one thread a rank, {os.cpu_count()} cores. "
        "Data: each rank has its own sequence. Sequence, tensor: one sequence whose length is this number times the "
        "ranks; ranks share its tokens, or heads, MLP and vocabulary. Each alone: the same processes train at once, "
        "each its own model on as many tokens, without communication. A step ends when the last rank has finished; "
        f"values are medians of {scaling.rounds} rounds in which the two take turns. The ratio is the median over "
        "rounds; with one rank, where both are equal, it shows the noise. It includes all costs and savings: "
        "messages, waiting, the operator in phases (sequence, tensor), and AdamW partitioned over ranks. Sent: passed "
        "to collectives, including DeepSpeed's. Exchange: what TSSA layers send between sequence ranks; its time is "
        "the fraction of a step that a rank spends there, waiting included, measured in separate steps. ³: more ranks "
        f"than cores. Load average before: {load:.1f}."
    )


def _require_even_shards(config: ParallelBenchmarkConfig, model: ModelConfig) -> None:
    for ranks in config.scaling.ranks:
        if obstacle := obstacle_to_tensor_ranks(model, ranks):
            raise ConfigError(obstacle)
    if min(config.traffic.tokens) < max(config.traffic.ranks):
        raise ConfigError(
            f"traffic.tokens {min(config.traffic.tokens)} are fewer than traffic.ranks {max(config.traffic.ranks)}: "
            "give each rank at least one token"
        )


def model_settings(layers: int, heads: int, width: int, vocab_size: int) -> dict[str, Any]:
    """Settings of a model that reads sequences of any length."""
    shape = {"layers": layers, "heads": heads, "width": width, "vocab_size": vocab_size}
    return {"pattern": "T", "positions": "none", "tssa": {"denom_bias": "head"}, **shape}


LIMIT_S = 600
TOGETHER, ALONE = "together", "alone"
EXCHANGES = {"all_gather_into_tensor", "all_to_all_single"}
SEQUENCE, TENSOR = "sequence", "tensor"


def bytes_sent_by_a_layer(ranks: int, tokens: int, model: Mapping[str, Any]) -> float:
    """Bytes that a rank passes to collectives in forward and backward of a model with one TSSA layer, for one
    sequence: the mean over ranks. Nothing else in the model communicates."""
    return mean(run_on_ranks(_bytes_sent, ranks, tokens, model, timeout_s=LIMIT_S))


def time_in_turns(axis: str, ranks: int, model: Mapping[str, Any], tokens: int, rounds: int) -> dict[str, Any]:
    """Training steps of all ranks together, along `axis`, in turns with steps of each alone.

    Returns:
        `seconds` of each round until the last rank has finished, by kind; `sent_bytes` of a step together, of the rank
        that sends most; `exchange_bytes`, what TSSA layers send of them between sequence ranks; `exchange_fractions`,
        the fraction of each step that a rank spends there (mean over ranks; empty except on the sequence axis).
    """
    turns = run_on_ranks(_train_in_turns, ranks, axis, model, tokens, rounds, timeout_s=LIMIT_S)
    return {
        "seconds": {
            kind: [max(seconds) for seconds in zip(*(rank.seconds[kind] for rank in turns), strict=True)]
            for kind in (TOGETHER, ALONE)
        },
        "sent_bytes": max(rank.sent_bytes for rank in turns),
        "exchange_bytes": max(rank.exchange_bytes for rank in turns),
        "exchange_fractions": [
            sum(fractions) / ranks for fractions in zip(*(rank.exchange_fractions for rank in turns), strict=True)
        ],
    }


class Turns(NamedTuple):
    """The values of one rank, as in `time_in_turns`."""

    seconds: dict[str, list[float]]
    sent_bytes: int
    exchange_bytes: int
    exchange_fractions: list[float]


class ExchangeClock(TorchDispatchMode):
    """Sums up the seconds that this thread spends in the collectives of `tost_lm.parallel.mesh`."""

    def __init__(self):
        super().__init__()
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func.namespace != FUNCTIONAL_COLLECTIVES.name:
            return func(*args, **(kwargs or {}))
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        self.seconds += time.perf_counter() - start
        return result


def _bytes_sent(tokens: int, settings: Mapping[str, Any]) -> int:
    world = start_world("cpu")
    mesh = build_mesh(world, ParallelConfig(sequence=world.size))
    split = even_split(mesh, tokens)
    model = _model(settings, mesh)
    tokens_BT = split.shard(torch.zeros(1, tokens, dtype=torch.int64))
    with Traffic() as traffic:
        output = model(tokens_BT, labels=tokens_BT, label_count=tokens, output_state=False, shard=shard_of(mesh, split))
        output.loss.backward()
    return traffic.bytes


def _train_in_turns(axis: str, model: Mapping[str, Any], tokens: int, rounds: int) -> Turns:
    world = start_world("cpu")
    together, alone = _meshes(world, axis)
    steps = {
        TOGETHER: _training_step(together, model, tokens * together.sequence.size * together.tensor.size),
        ALONE: _training_step(alone, model, tokens),
    }
    # In the first step the optimizer creates its state.
    with Traffic() as traffic:
        steps[TOGETHER]()
    with Traffic() as alone_traffic:
        steps[ALONE]()
    assert {sent.group for sent in alone_traffic.sent} == {alone.replicas.group.group_name}

    seconds: dict[str, list[float]] = {kind: [] for kind in steps}
    exchange_fractions = []
    for _ in range(rounds):
        for kind, step in steps.items():
            _wait_for_all()
            seconds[kind].append(call_seconds(step, "cpu"))
        if axis == SEQUENCE:
            _wait_for_all()
            with ExchangeClock() as clock:
                step_seconds = call_seconds(steps[TOGETHER], "cpu")
            exchange_fractions.append(clock.seconds / step_seconds)
    exchange = [sent.bytes for sent in traffic.sent if axis == SEQUENCE and sent.kind in EXCHANGES]
    return Turns(seconds, traffic.bytes, sum(exchange), exchange_fractions)


def _meshes(world: World, axis: str) -> tuple[Mesh, Mesh]:
    """A mesh of all ranks along one axis, and one of each rank alone."""
    axes = {axis: world.size} if axis in (SEQUENCE, TENSOR) else {}
    together = build_mesh(world, validate(ParallelConfig, axes, "benchmarks.parallel"))
    return together, mesh_of_one(world.device)


def _training_step(mesh: Mesh, model: Mapping[str, Any], seq_len: int) -> Callable[[], object]:
    """A training step on one sequence, of which this rank has a shard."""
    torch.manual_seed(0)
    optim = OptimConfig()
    sharded = _model(model, mesh)
    engine = build_engine(
        sharded, ADAMW.build(sharded, optim), mesh, ParallelConfig(zero_stage=1),
        StepSettings(grad_clip=optim.grad_clip),
    )  # fmt: skip
    tiling = tile(mesh, seq_len)
    windows = torch.randint(sharded.config.vocab_size, (1, seq_len + 1))
    here = slice(*tiling.tiles[0].columns)
    batch = MicroBatch(windows[:, :-1][:, here], windows[:, 1:][:, here])
    return lambda: train_step(engine, [batch], tiling, optim.lr)


def _model(settings: Mapping[str, Any], mesh: Mesh) -> TostLM:
    return parallelize(TiledLM(validate(ModelConfig, dict(settings), "benchmarks.parallel")), mesh)


def _wait_for_all() -> None:
    max_over_ranks(0)()


if __name__ == "__main__":
    run_program(
        main, name="benchmarks.parallel", doc=__doc__ or "", positional="[CONFIG]", config=ParallelBenchmarkConfig
    )
