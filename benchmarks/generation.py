"""Time of generating a text from the state, compared with reading the whole text again for every token.

    python -m benchmarks.generation
    python -m benchmarks.generation bench.tokens=256

Greedy generation from one token to the number of positions of the model, with learned positions and a denom_bias per
position. The rival generates as the released code does: for each token, all layers read the whole text again, and the
head reads the last token. The rival uses our operator, which is faster than theirs. It is timed at bench.lengths evenly
spaced lengths of the text, and its total time is the trapezoid sum between them. Output: one table, and all values in
benchmarks/results/.
"""

from collections.abc import Mapping
from itertools import pairwise
from statistics import median
from typing import Any

from pydantic import Field

from benchmarks import measure
from tost_lm.config import Section, run_program, validate
from tost_lm.model.config import ModelConfig


class BenchConfig(measure.DeviceConfig):
    """Number of tokens, and measurements."""

    tokens: int = Field(default=2048, gt=1)
    """Tokens to generate, and positions of the model."""
    lengths: int = Field(default=8, gt=0)
    """Number of text lengths at which the rival is timed."""
    rounds: int = Field(default=3, gt=0)
    """Timed calls of the rival at each length; the result is the median."""


class GenerationBenchmarkConfig(Section):
    """Settings of `benchmarks.generation`."""

    shape: measure.ModelShape = measure.ModelShape()
    bench: BenchConfig = BenchConfig()


def run(config: GenerationBenchmarkConfig, device: str) -> tuple[list[dict[str, Any]], str]:
    bench = config.bench
    model = {**config.shape.model_dump(), "pattern": "T", "max_positions": bench.tokens}
    validate(ModelConfig, model, "benchmarks.generation")
    lengths = sorted({max(1, bench.tokens * n // bench.lengths) for n in range(bench.lengths + 1)})
    cells = [
        measure.run_cell(
            "benchmarks.generation_cells:generation",
            device=device, limit_s=bench.cell_seconds, model=model, lengths=lengths, rounds=rounds,
        )
        for rounds in (bench.rounds, 0)
    ]  # fmt: skip
    return cells, table(*cells)


main = measure.benchmark("generation", run)


def table(cell: Mapping[str, Any], alone: Mapping[str, Any]) -> str:
    """Rows by length, and total times; `alone`: generation in its own process, to measure memory."""
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
        main, name="benchmarks.generation", doc=__doc__ or "", positional="[CONFIG]", config=GenerationBenchmarkConfig
    )
