"""Time and memory of training on one sequence by its length, tile by tile and in whole rows.

    python -m benchmarks.long
    python -m benchmarks.long shape.layers=12 shape.heads=12 shape.width=768 shape.vocab_size=50304 \
      bench.tile_tokens=32768 "bench.lengths=[131072, 1048576, 4194304]"

A step is forward, backward, clipping and AdamW through DeepSpeed's ZeRO stage 1, as in `tost train`. Memory is the
peak of a process: on a GPU what torch allocated, on a CPU resident memory with libraries. On a CPU, freed memory of a
megabyte and more is returned at once (MALLOC_MMAP_THRESHOLD_), so that the peak does not include what glibc keeps.
Times are measured in one process in which the lengths take turns, with equal numbers of tokens per turn. With the
defaults it takes about 20 minutes on 2 CPU cores. Output: one table, and all values in results/benchmarks/.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from pydantic import Field, PositiveInt

from benchmarks import measure
from benchmarks.engine import engine_of
from benchmarks.measure import call_seconds, peak_bytes
from tost_lm.command_line import run_program
from tost_lm.config import Section, validate
from tost_lm.data.prefetch import MicroBatch
from tost_lm.mixers.softmax.settings import SoftmaxSettings
from tost_lm.model.config import ModelConfig
from tost_lm.optim.settings import OptimConfig
from tost_lm.pretrain.step import train_step
from tost_lm.pretrain.tiled import tile

TILES, WHOLE = "tile by tile", "whole rows"


class ShapeConfig(measure.ModelShape):
    """A model without parameters per position."""

    pattern: str = "T"
    """The mixer of each layer."""
    softmax: SoftmaxSettings = SoftmaxSettings()


class BenchConfig(measure.DeviceConfig):
    """Lengths, tiles, device and time limit."""

    lengths: list[PositiveInt] = Field(default=[16384, 262144, 1048576], min_length=1)
    """Tokens of the sequence."""
    tile_tokens: int = Field(default=4096, gt=0)
    """Tokens of a tile."""
    rounds: int = Field(default=3, gt=0)
    """Rounds in which the lengths take turns."""
    turn_tokens: int = Field(default=262144, gt=0)
    """The time of longer sequences is that of the one step in which memory is measured."""
    cell_seconds: float = Field(default=900.0, gt=0)
    """Time limit of each process [s]."""


class LongBenchmarkConfig(Section):
    """Settings of `benchmarks.long`."""

    shape: ShapeConfig = ShapeConfig(layers=4, heads=4, width=128, vocab_size=4096)
    bench: BenchConfig = BenchConfig()


def run(config: LongBenchmarkConfig, device: str) -> tuple[list[dict[str, Any]], str]:
    bench = config.bench
    model = {**config.shape.model_dump(), "positions": "none", "tssa": {"denom_bias": "head"}}
    validate(ModelConfig, model, "benchmarks.long")
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)  # for the measured processes
    call = {"device": device, "limit_s": bench.cell_seconds, "model": model}
    cells: list[dict[str, Any]] = []
    for tokens in sorted(set(bench.lengths)):
        for rival, tile_tokens in ((TILES, bench.tile_tokens), (WHOLE, None)):
            given_up = any("failed" in cell and cell["rival"] == rival for cell in cells)
            cell = measure.NOT_TRIED if given_up else measure.run_cell(
                "benchmarks.long:one_step", tokens=tokens, tile_tokens=tile_tokens, **call
            )  # fmt: skip
            cells.append({"rival": rival, "tokens": tokens, **cell})
            print(f"{rival}, {tokens:,} tokens: {cell}", flush=True)
    turning = [tokens for tokens in bench.lengths if tokens <= bench.turn_tokens]
    turns = measure.run_cell(
        "benchmarks.long:in_turns", lengths=turning, tile_tokens=bench.tile_tokens, rounds=bench.rounds, **call
    )
    rows = [row(tokens, cells, turns) for tokens in sorted(set(bench.lengths))]
    text = (
        f"{measure.markdown_table(rows)}\n\nTiles of {bench.tile_tokens:,} tokens. Ratios are to the first line. Times "
        f"per token are medians of {bench.rounds} turns, beyond {bench.turn_tokens:,} tokens of one step."
    )
    return [*cells, {"rival": TILES, "turns": turns}], text


main = measure.benchmark("long", run)


def row(tokens: int, cells: Sequence[Mapping[str, Any]], turns: Mapping[str, Any]) -> dict[str, str]:
    """A line of the table."""
    tiles = [cell for cell in cells if cell["rival"] == TILES and "failed" not in cell]
    here = next((cell for cell in tiles if cell["tokens"] == tokens), None)
    [there] = [cell for cell in cells if cell["rival"] == WHOLE and cell["tokens"] == tokens]
    line = {"tokens": f"{tokens:,}", "memory": "–", "ratio": "–", "µs a token": "–", "ratio of times": "–"}
    if here:
        seconds = {int(length): median(values) for length, values in turns.get("seconds", {}).items()}
        per_token = seconds.get(tokens, here["seconds"]) / tokens
        first = seconds.get(tiles[0]["tokens"], tiles[0]["seconds"]) / tiles[0]["tokens"]
        line |= {
            "memory": f"{here['peak_bytes'] / 1e9:.3f} GB",
            "ratio": f"{here['peak_bytes'] / tiles[0]['peak_bytes']:.3f}",
            "µs a token": f"{per_token * 1e6:.1f}",
            "ratio of times": f"{per_token / first:.2f}",
        }
    line["memory in whole rows"] = there.get("failed") or f"{there['peak_bytes'] / 1e9:.3f} GB"
    return line


def one_step(device: str, model: dict[str, Any], tokens: int, tile_tokens: int | None) -> dict[str, Any]:
    """Seconds of the second step, and peak memory of the process until its end."""
    train = step_of(device, model, tile_tokens)
    train(tokens)
    return {"seconds": call_seconds(lambda: train(tokens), device), "peak_bytes": peak_bytes(device)}


def in_turns(
    device: str, model: dict[str, Any], lengths: list[int], tile_tokens: int, rounds: int
) -> dict[str, dict[int, list[float]]]:
    """Seconds of a step, by length."""
    train = step_of(device, model, tile_tokens)
    seconds: dict[int, list[float]] = {length: [] for length in lengths}
    for length in lengths:
        train(length)
    for _ in range(rounds):
        for length in lengths:
            steps = max(lengths) // length
            seconds[length].append(call_seconds(partial(_repeat, train, length, steps), device) / steps)
    return {"seconds": seconds}


def _repeat(train: Callable[[int], object], length: int, steps: int) -> None:
    for _ in range(steps):
        train(length)


def step_of(device: str, model: dict[str, Any], tile_tokens: int | None) -> Callable[[int], object]:
    """A function that trains one step on a sequence of this many random tokens."""
    settings = validate(ModelConfig, model, "benchmarks.long")
    engine = engine_of(settings, device, bfloat16=device == "cuda")

    def train(tokens: int) -> None:
        window = torch.randint(settings.vocab_size, (1, tokens + 1), device=engine.mesh.device)
        batch = MicroBatch(window[:, :-1], window[:, 1:])
        train_step(engine, [batch], tile(engine.mesh, tokens, tile_tokens), OptimConfig().lr)

    return train


if __name__ == "__main__":
    run_program(main, name="benchmarks.long", doc=__doc__ or "", positional="[CONFIG]", config=LongBenchmarkConfig)
