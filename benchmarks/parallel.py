"""Traffic between ranks, and weak scaling.

    python -m benchmarks.parallel
    python -m benchmarks.parallel "scaling.ranks=[1, 2]" "traffic.ranks=[16]" traffic.count_up_to=1024

Traffic: bytes that one rank sends and receives in a TSSA layer and a training step, when ranks share the tokens of a
sequence, beside published methods. Ours is counted in torch's dispatcher on real gloo ranks up to traffic.count_up_to
tokens; everything else follows from the formulas printed with the table.

Weak scaling: training steps of a small model through DeepSpeed's ZeRO stage 1 on 1, 2, … gloo ranks with one thread and
equal tokens per rank. They take turns with the same ranks each training its own model without communication, which
bounds what the machine can do. With the defaults it takes about 5 minutes on 2 busy CPU cores. Output: two tables, and
all values in benchmarks/results/.
"""

import os
from collections.abc import Mapping
from statistics import median
from typing import Any, NamedTuple

from pydantic import Field, PositiveInt

from benchmarks import measure
from tost_lm.config import Section, run_program, validate
from tost_lm.errors import ConfigError
from tost_lm.model.config import ModelConfig
from tost_lm.parallel.settings import obstacle_to_tensor_ranks
from tost_lm.sizes import ALL_GATHER_RANKS

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
    from benchmarks.parallel_cells import bytes_sent_by_a_layer

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
    from benchmarks.parallel_cells import time_in_turns

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
    return {"pattern": "T", "positions": "sinusoidal", "tssa": {"denom_bias": "head"}, **shape}


if __name__ == "__main__":
    run_program(
        main, name="benchmarks.parallel", doc=__doc__ or "", positional="[CONFIG]", config=ParallelBenchmarkConfig
    )
