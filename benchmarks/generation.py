"""Time of generating a text from the state, compared with reading the whole text again for every token.

    python -m benchmarks.generation
    python -m benchmarks.generation bench.tokens=256

Greedy generation from one token to the number of positions of the model, with learned positions and a denom_bias per
position. The rival generates as the released code does: for each token, all layers read the whole text again, and the
head reads the last token. The rival uses our operator, which is faster than theirs. It is timed at bench.lengths evenly
spaced lengths of the text, and its total time is the trapezoid sum between them. Output: one table, and all values in
results/benchmarks/.
"""

import time
from collections.abc import Mapping
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from pydantic import Field

from benchmarks import measure
from benchmarks.measure import call_seconds, held_bytes
from tost_lm.command_line import run_program
from tost_lm.config import Section, validate
from tost_lm.inference.generation import continuations, greedy, state_bytes
from tost_lm.model import ModelConfig, TostLM
from tost_lm.model.streaming import to_running_dtype
from tost_lm.ops.cross_entropy import IGNORED_LABEL


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
            "benchmarks.generation:generation",
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


@torch.inference_mode()
def generation(device: str, model: dict[str, Any], lengths: list[int], rounds: int) -> dict[str, Any]:
    """For each length: seconds of generating the tokens since the previous length, seconds of reading the whole text
    again, and memory beyond that at the first length. With 0 rounds the rival does not run, so that memory is that of
    generation alone."""
    torch.manual_seed(0)
    lm = TostLM(validate(ModelConfig, model, "benchmark")).to(device).eval()
    ids, first, seconds = [0], 0, 0.0
    output = lm(torch.tensor([ids], device=device))
    state = to_running_dtype(output.state)  # the form it has from the first token on
    assert state is not None
    found: dict[str, Any] = {"state_bytes": state_bytes(state), "seconds": {}, "prefix_seconds": {}, "extra_bytes": {}}
    began = time.perf_counter()
    for next_B in continuations(lm, output, lengths[-1], greedy):
        ids.append(int(next_B))
        seconds += time.perf_counter() - began
        tokens = len(ids) - 1
        if tokens in lengths:
            found["seconds"][tokens], seconds = seconds, 0.0
            first = first or held_bytes(device)
            found["extra_bytes"][tokens] = held_bytes(device) - first
            if rounds:
                found["prefix_seconds"][tokens] = _seconds_of_reading(lm, ids, device, rounds)
        began = time.perf_counter()
    return found


def _seconds_of_reading(lm: TostLM, ids: list[int], device: str, rounds: int) -> list[float]:
    """Read all ids but the last, with the head on one token."""
    inputs, labels = (torch.tensor([x], device=device) for x in (ids[:-1], ids[1:]))
    labels[:, :-1] = IGNORED_LABEL
    lm(inputs, labels)
    return [call_seconds(lambda: lm(inputs, labels), device) for _ in range(rounds)]


if __name__ == "__main__":
    run_program(
        main, name="benchmarks.generation", doc=__doc__ or "", positional="[CONFIG]", config=GenerationBenchmarkConfig
    )
