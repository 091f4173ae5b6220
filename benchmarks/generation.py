"""Generating a text from the state, beside reading the whole text again for every token.

    python -m benchmarks.generation
    python -m benchmarks.generation bench.tokens=256

Greedy, from a single token on, as many tokens as the model has positions: by tost-base's shape, with a position and a
denom_bias learned for each. The rival is how the authors' code generates: for each token all layers read the whole text
again, and the head its last token; it has our operator, which is faster than theirs. It is timed whenever the text
has one of `bench.lengths` lengths, evenly spread, and its time for all tokens is summed between these (trapezoids).
Prints the table and writes it with all figures to benchmarks/results/.
"""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal

from pydantic import Field

from benchmarks import measure
from tost_lm.config import Section, run_program, validate
from tost_lm.model.config import ModelConfig


class ShapeConfig(Section):
    """A model of TSSA layers."""

    layers: int = Field(default=12, gt=0)
    """Blocks."""
    heads: int = Field(default=12, gt=0)
    """Heads."""
    width: int = Field(default=768, gt=0)
    """Channels."""
    vocab_size: int = Field(default=50304, gt=0)
    """Rows of the embedding."""


class BenchConfig(Section):
    """What is measured."""

    tokens: int = Field(default=2048, gt=1)
    """Tokens to generate, and positions of the model."""
    lengths: int = Field(default=8, gt=0)
    """At so many lengths of the text the rival is timed."""
    rounds: int = Field(default=3, gt=0)
    """Timed calls of the rival at each; the median is taken."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """What to compute on; auto takes cuda if it is there."""
    cell_seconds: float = Field(default=3600.0, gt=0)
    """The process takes no longer."""


class GenerationBenchmarkConfig(Section):
    """What `benchmarks.generation` reads."""

    shape: ShapeConfig = ShapeConfig()
    bench: BenchConfig = BenchConfig()


def main(path: Path | None, config: GenerationBenchmarkConfig) -> None:
    from tost_lm.evaluation.subject import pick_device

    bench = config.bench
    device = pick_device() if bench.device == "auto" else bench.device
    model = {**config.shape.model_dump(), "pattern": "T", "max_positions": bench.tokens}
    validate(ModelConfig, model, "benchmarks.generation")
    lengths = sorted({max(1, bench.tokens * part // bench.lengths) for part in range(bench.lengths + 1)})
    measure.RESULTS.mkdir(parents=True, exist_ok=True)  # whether it can be written to shows before the work
    cells = [
        measure.run_cell(
            "benchmarks.generation_cells:generation",
            device=device, limit_s=bench.cell_seconds, model=model, lengths=lengths, rounds=rounds,
        )
        for rounds in (bench.rounds, 0)
    ]  # fmt: skip
    text = table(*cells)
    print(f"{text}\n\nwrote {measure.store('generation', device, config, cells, text)}")


def table(cell: Mapping[str, Any], alone: Mapping[str, Any]) -> str:
    """Rows by length, and what both take in all; `alone`: generation in a process of its own, for its memory."""
    if failed := cell.get("failed") or alone.get("failed"):
        return failed
    prefix = {int(length): median(seconds) for length, seconds in cell["prefix_seconds"].items()}
    state = {int(length): seconds for length, seconds in cell["seconds"].items()}
    rows = [
        {
            "tokens so far": f"{end:,}",
            "a token from the state": f"{1e3 * state[end] / (end - begin):.1f} ms",
            "by reading all again": f"{1e3 * prefix[end]:.0f} ms",
            f"memory beyond that at {min(prefix)}": f"{alone['extra_bytes'][str(end)] / 1e6:.1f} MB",
        }
        for begin, end in pairwise(prefix)
    ]
    whole, ours = sum((b - a) * (prefix[a] + prefix[b]) / 2 for a, b in pairwise(prefix)), sum(state.values())
    return (
        f"{measure.markdown_table(rows)}\n\nAll {max(state):,} tokens: {ours:.1f} s from the state, {whole:,.0f} s by "
        f"reading all again: {whole / ours:.1f} times as fast. The state: {cell['state_bytes']:,} bytes."
    )


if __name__ == "__main__":
    run_program(
        main, name="benchmarks.generation", doc=__doc__ or "", takes="[CONFIG]", config=GenerationBenchmarkConfig
    )
