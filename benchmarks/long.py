"""Training on one sequence by its length: tile by tile, and in whole rows.

    python -m benchmarks.long
    python -m benchmarks.long shape.layers=12 shape.heads=12 shape.width=768 shape.vocab_size=50304 \
      bench.tile_tokens=32768 "bench.lengths=[131072, 1048576, 4194304]"

A step is forward, backward, clipping and AdamW through DeepSpeed's ZeRO stage 1, as pretrain.train takes it. Memory is
the most that a process of its own ever held: on a GPU what torch allocated, on a CPU resident memory, libraries
included; there freed memory of a megabyte and more goes back to the system at once (MALLOC_MMAP_THRESHOLD_), or the
peak would tell what glibc keeps as well. The time of a token is taken in one process in which the lengths take turns,
as many steps of each as make the same number of tokens. With the defaults it takes about 20 minutes on 2 CPU cores.
Prints the table and writes it with all figures to benchmarks/results/.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal

from pydantic import Field, PositiveInt

from benchmarks import measure
from tost_lm.config import Section, run_program, validate
from tost_lm.model.config import ModelConfig

TILES, WHOLE = "tile by tile", "whole rows"


class ShapeConfig(Section):
    """A model without anything learned for a position."""

    pattern: str = "T"
    """The mixer of each layer."""
    window: int = 0
    """Of A layers."""
    layers: int = Field(default=4, gt=0)
    """Blocks."""
    heads: int = Field(default=4, gt=0)
    """Heads of the mixers."""
    width: int = Field(default=128, gt=0)
    """Channels."""
    vocab_size: int = Field(default=4096, gt=0)
    """Rows of the embedding."""


class BenchConfig(Section):
    """What is measured, for how long."""

    lengths: list[PositiveInt] = Field(default=[16384, 262144, 1048576], min_length=1)
    """Tokens of the sequence."""
    tile_tokens: int = Field(default=4096, gt=0)
    """Tokens of a tile."""
    rounds: int = Field(default=3, gt=0)
    """Turns of the lengths that are timed."""
    turn_tokens: int = Field(default=262144, gt=0)
    """Longer sequences are timed by the one step that their memory is measured in."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """What to compute on; auto takes cuda if it is there, and there computes in bfloat16."""
    cell_seconds: float = Field(default=900.0, gt=0)
    """No single process takes longer."""


class LongBenchmarkConfig(Section):
    """What `benchmarks.long` reads."""

    shape: ShapeConfig = ShapeConfig()
    bench: BenchConfig = BenchConfig()


def main(path: Path | None, config: LongBenchmarkConfig) -> None:
    from tost_lm.evaluation.subject import pick_device

    bench = config.bench
    device = pick_device() if bench.device == "auto" else bench.device
    model = {**config.shape.model_dump(), "positions": "sinusoidal", "denom_bias": "head"}
    validate(ModelConfig, model, "benchmarks.long")
    measure.RESULTS.mkdir(parents=True, exist_ok=True)  # whether it can be written to shows before the work
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)  # of the processes that are measured
    call = {"device": device, "limit_s": bench.cell_seconds, "model": model}
    cells = []
    for tokens in sorted(set(bench.lengths)):
        for rival, tile_tokens in ((TILES, bench.tile_tokens), (WHOLE, None)):
            given_up = any("failed" in cell and cell["rival"] == rival for cell in cells)
            cell = measure.NOT_TRIED if given_up else measure.run_cell(
                "benchmarks.long_cells:one_step", tokens=tokens, tile_tokens=tile_tokens, **call
            )  # fmt: skip
            cells.append({"rival": rival, "tokens": tokens, **cell})
            print(f"{rival}, {tokens:,} tokens: {cell}", flush=True)
    turning = [tokens for tokens in bench.lengths if tokens <= bench.turn_tokens]
    turns = measure.run_cell(
        "benchmarks.long_cells:in_turns", lengths=turning, tile_tokens=bench.tile_tokens, rounds=bench.rounds, **call
    )
    rows = [row(tokens, cells, turns) for tokens in sorted(set(bench.lengths))]
    text = (
        f"{measure.markdown_table(rows)}\n\nTiles of {bench.tile_tokens:,} tokens. Ratios are to the first line; times "
        f"of a token are medians of {bench.rounds} turns, beyond {bench.turn_tokens:,} tokens of one step."
    )
    record = [*cells, {"rival": TILES, "turns": turns}]
    print(f"\n{text}\n\nwrote {measure.store('long', device, config, record, text)}")


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


if __name__ == "__main__":
    run_program(main, name="benchmarks.long", doc=__doc__ or "", takes="[CONFIG]", config=LongBenchmarkConfig)
