"""What the ranks send each other, and what it costs them.

    python -m benchmarks.parallel
    python -m benchmarks.parallel "scaling.ranks=[1, 2]" "traffic.ranks=[16]" traffic.count_up_to=1024

Traffic: bytes that one rank sends and receives in a TSSA layer and a training step, where the tokens of a sequence lie
on several ranks, beside the published ways of sharing a sequence out. Ours are counted in torch's dispatcher on real
gloo ranks up to traffic.count_up_to tokens; all else are the formulas printed with the table.

Weak scaling: training steps of a small model through DeepSpeed's ZeRO stage 1 on 1, 2, … gloo ranks of one thread,
with the same tokens a rank, in turns with the same ranks each training a model of its own without a message: what the
machine can do at most. With the defaults it takes about 5 minutes on 2 busy CPU cores. Prints both tables and
writes them with all figures to benchmarks/results/.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from pydantic import Field, PositiveInt

from benchmarks import measure
from tost_lm.config import Section, run_program, validate
from tost_lm.errors import ConfigError
from tost_lm.model.config import ModelConfig
from tost_lm.parallel.config import obstacle_to_tensor_ranks

OURS, RING, ULYSSES, LASP2 = "TSSA, here", "Ring Attention", "DeepSpeed Ulysses", "LASP-2"
NO_AXIS, DATA, SEQUENCE, TENSOR = "none", "data", "sequence", "tensor"


class TrafficConfig(Section):
    """The layer whose traffic is told: one sequence on several ranks; the defaults are tost-base's."""

    tokens: list[PositiveInt] = Field(default=[1024, 16384, 65536, 1048576], min_length=1)
    """Lengths of the sequence."""
    ranks: list[PositiveInt] = Field(default=[4, 8], min_length=1)
    """Ranks that share it."""
    heads: int = Field(default=12, gt=0)
    """Heads of the layer."""
    channels: int = Field(default=64, gt=0)
    """Channels of a head."""
    count_up_to: int = Field(default=16384, ge=0)
    """Tokens up to which ours is counted on real ranks; beyond, the formula."""


class ScalingConfig(Section):
    """The model that the ranks train, and how they do."""

    ranks: list[PositiveInt] = Field(default=[1, 2, 4], min_length=1)
    """Ranks along one axis, the others being 1."""
    tokens: int = Field(default=2048, gt=0)
    """For each rank: of its own sequence (data), or its share of one that is longer with every rank."""
    layers: int = Field(default=2, gt=0)
    """Blocks, of TSSA."""
    heads: int = Field(default=4, gt=0)
    """Heads of the mixers."""
    width: int = Field(default=256, gt=0)
    """Channels."""
    vocab_size: int = Field(default=256, gt=0)
    """Rows of the embedding."""
    rounds: int = Field(default=15, gt=0)
    """Timed steps of each kind, in turns."""


class ParallelBenchmarkConfig(Section):
    """What `benchmarks.parallel` reads."""

    traffic: TrafficConfig = Field(default_factory=TrafficConfig)
    scaling: ScalingConfig = Field(default_factory=ScalingConfig)


class Bytes(NamedTuple):
    """Of one rank, one layer and one training step: forward and backward, one sequence."""

    sent: float
    """What the rank hands to its collectives or to its neighbour."""
    received: float
    """What comes from other ranks."""


def main(path: Path | None, config: ParallelBenchmarkConfig) -> None:
    traffic, scaling = config.traffic, config.scaling
    model = model_settings(scaling)
    _refuse_what_cannot_be_shared(config)
    measure.RESULTS.mkdir(parents=True, exist_ok=True)  # whether it can be written to shows before the work
    load = os.getloadavg()[0]
    sendings = traffic_cells(traffic)
    steps = scaling_cells(scaling, model)
    text = (
        f"## Traffic of a layer\n\n{measure.markdown_table([traffic_row(cell) for cell in sendings])}\n\n"
        f"{traffic_notes(traffic)}\n\n"
        f"## Weak scaling\n\n{measure.markdown_table([scaling_row(cell) for cell in steps])}\n\n"
        f"{scaling_notes(scaling, load)}"
    )
    print(f"\n{text}\n\nwrote {measure.store('parallel', 'cpu', config, [*sendings, *steps], text)}")


def model_settings(shape: ScalingConfig) -> dict[str, Any]:
    """Of a model that reads sequences of any length."""
    settings = shape.model_dump(include={"layers", "heads", "width", "vocab_size"})
    return {"pattern": "T", "positions": "sinusoidal", "denom_bias": "head", **settings}


def traffic_by_formula(tokens: int, ranks: int, heads: int, channels: int) -> dict[str, Bytes]:
    """Bytes by method. K, V, q and o are bfloat16, statistics and states float32.

    Sources: ours, `tost_lm.parallel.sequence`; arXiv 2310.01889; 2309.14509; 2502.07563. Assumptions as in
    `traffic_notes`.
    """
    C, others = heads * channels, ranks - 1
    shard = 2 * tokens * C / ranks  # bytes of this rank's keys, or of its values, queries or outputs
    statistics = 8 * (2 * C + heads)
    ring = others * (2 + 4) * shard
    ulysses = 2 * 4 * shard
    states = 2 * 4 * heads * channels**2
    return {
        OURS: Bytes(statistics, others * statistics),
        RING: Bytes(ring, ring),
        ULYSSES: Bytes(ulysses, ulysses * others / ranks),
        LASP2: Bytes(states, others * states),
    }


def traffic_cells(traffic: TrafficConfig) -> list[dict[str, Any]]:
    """A cell for each number of ranks and length: `bytes` by method, and whether ours were `counted`."""
    from benchmarks.parallel_cells import bytes_sent_by_a_layer

    cells = []
    for ranks in traffic.ranks:
        for tokens in sorted(set(traffic.tokens)):
            by_method = traffic_by_formula(tokens, ranks, traffic.heads, traffic.channels)
            counted = tokens <= traffic.count_up_to
            if counted:
                sent = bytes_sent_by_a_layer(ranks, tokens, traffic.heads, traffic.channels)
                by_method[OURS] = Bytes(sent, (ranks - 1) * sent)
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
        name: f"{_in_units(both['sent'])} / {_in_units(both['received'])}{marks.get(name, '')}"
        for name, both in cell["bytes"].items()
    }
    return {"ranks": str(cell["ranks"]), "tokens": f"{cell['tokens']:,}", **moved}


def traffic_notes(traffic: TrafficConfig) -> str:
    C = traffic.heads * traffic.channels
    return (
        f"Bytes sent / received by one rank in one layer and one training step (forward and backward, without "
        f"recomputation), one sequence of T tokens on R ranks, H = {traffic.heads} heads of D = {traffic.channels} "
        f"channels, C = {C}. Sent is what a rank hands to its collectives or to its neighbour; received is what comes "
        "from other ranks. Where an all-gather goes round a ring of ranks, a rank passes on as much as it receives, so "
        "received is then also what leaves it.\n\n"
        f"- {OURS}: 4 all-gathers of statistics in float32, 4·(C + C+H) forward and as much backward: 8·(2C+H) sent, "
        "R − 1 times that received. Counted in torch's dispatcher on gloo ranks; ¹: the formula, not counted.\n"
        f"- {RING} (Ring Attention with Blockwise Transformers for Near-Infinite Context, arXiv 2310.01889): keys and "
        "values go round R − 1 times forward, they and their gradients R − 1 times backward, in bfloat16: "
        "(R − 1)·6·2·C·T/R. Every block visits every rank, as published; gradients start beside their owner.\n"
        f"- {ULYSSES} (System Optimizations for Enabling Training of Extreme Long Sequence Transformer Models, arXiv "
        "2309.14509): all-to-all of q, k, v and o forward and of their gradients backward, in bfloat16: 8·2·C·T/R, of "
        "which 1/R stays on its rank. As published the ranks must divide the heads; ²: they do not, and the figure is "
        "that of heads shared evenly.\n"
        f"- {LASP2} (Rethinking Sequence Parallelism for Linear Attention and Its Hybrid, arXiv 2502.07563): one "
        "all-gather of the state D×D of each head forward and one of its gradient backward, taken as float32: 2·4·H·D² "
        "sent, R − 1 times that received.\n\n"
        "The methods compute different attention: Ring Attention and Ulysses softmax attention, LASP-2 linear "
        "attention. Nor are bytes time: a TSSA layer waits for four small messages a step, LASP-2 for two, and Ring "
        "Attention's can travel while it computes."
    )


def scaling_cells(scaling: ScalingConfig, model: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A cell for each axis and number of ranks; one rank has no axis."""
    from benchmarks.parallel_cells import take_turns

    cells = []
    for ranks in sorted(set(scaling.ranks)):
        for axis in (DATA, SEQUENCE, TENSOR) if ranks > 1 else (NO_AXIS,):
            turns = take_turns(axis, ranks, model, scaling.tokens, scaling.rounds)
            cell = {"work": "scaling", "axis": axis, "ranks": ranks, "tokens_a_rank": scaling.tokens, **turns}
            print("; ".join(f"{key} {value}" for key, value in scaling_row(cell).items()), flush=True)
            cells.append(cell)
    return cells


def scaling_row(cell: Mapping[str, Any]) -> dict[str, str]:
    together, alone = cell["seconds"]["together"], cell["seconds"]["alone"]
    ratio = median(without / with_ for with_, without in zip(together, alone, strict=True))
    crowded = "³" if cell["ranks"] > (os.cpu_count() or 1) else ""
    exchange = cell["exchange_shares"]
    return {
        "axis": cell["axis"],
        "ranks": f"{cell['ranks']}{crowded}",
        "tokens/s a rank": f"{cell['tokens_a_rank'] / median(together):,.0f}",
        "each alone": f"{cell['tokens_a_rank'] / median(alone):,.0f}",
        "ratio": f"{ratio:.0%}",
        "sent a rank and step": _in_units(cell["sent_bytes"]) if cell["ranks"] > 1 else "–",
        "of it in the exchange": _in_units(cell["exchange_bytes"]) if exchange else "–",
        "time in the exchange": f"{median(exchange):.1%}" if exchange else "–",
    }


def scaling_notes(scaling: ScalingConfig, load: float) -> str:
    return (
        f"{scaling.layers} TSSA layers, {scaling.heads} heads, width {scaling.width}, vocabulary {scaling.vocab_size}, "
        f"float32, ZeRO stage 1, {scaling.tokens:,} tokens a rank, gloo, one thread a rank, {os.cpu_count()} cores. "
        "Data: each rank has a sequence of its own. Sequence, tensor: one sequence of so many tokens for each rank; a "
        "sequence rank has its share of the tokens, a tensor rank its share of heads, MLP and vocabulary. Each alone: "
        "the same processes train at once, each a model of its own on as many tokens, and send nothing. A step lasts "
        f"until the last rank is done; figures are medians of {scaling.rounds} rounds in which the two take turns. The "
        "ratio is the median of the rounds' own; with one rank, where both do the same, it shows the noise. It holds "
        "all that sharing costs or saves: messages, waiting for one another, the operator in phases (sequence, "
        "tensor), AdamW shared out among ranks. Sent: what a rank hands to its collectives, DeepSpeed's included. "
        "Exchange: what the TSSA layers send along "
        "the sequence; its time is the share of a step that a rank spends there, waiting for other ranks included, "
        f"measured in steps of their own. ³: more ranks than cores. The machine's load average before was {load:.1f}."
    )


def _refuse_what_cannot_be_shared(config: ParallelBenchmarkConfig) -> None:
    model = validate(ModelConfig, model_settings(config.scaling), "benchmarks.parallel")
    for ranks in config.scaling.ranks:
        if obstacle := obstacle_to_tensor_ranks(model, ranks):
            raise ConfigError(obstacle)
    if min(config.traffic.tokens) < max(config.traffic.ranks):
        raise ConfigError(
            f"traffic.tokens {min(config.traffic.tokens)} are fewer than traffic.ranks {max(config.traffic.ranks)}: "
            "every rank needs a token"
        )


def _in_units(size: float) -> str:
    power = max(p for p in range(4) if size >= 1000**p or p == 0)
    return f"{size / 1000**power:.3g} {('B', 'kB', 'MB', 'GB')[power]}"


if __name__ == "__main__":
    run_program(main, name="benchmarks.parallel", doc=__doc__ or "", takes="[CONFIG]", config=ParallelBenchmarkConfig)
