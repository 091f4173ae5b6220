"""Causal TSSA against its rivals: time, memory and share of the memory bandwidth by the length of the sequence.

    python -m benchmarks.operator
    python -m benchmarks.operator "bench.lengths=[16384]" shape.heads=16

Measures this project's operator, the formulas as written under autograd ("naive", plain and under torch.compile) and
causal softmax attention (torch's scaled_dot_product_attention; flash attention where the device has it), forward and
forward + backward, from 1k to 1M tokens as far as memory and bench.cell_seconds allow. The share of bandwidth compares
with a copy on the same device, counting only what has to move: w once and y once forward, w, dy and dw once more
backward (q, k, v and their like for attention). With the defaults it takes about 12 minutes on 2 CPU cores. Prints one
table and writes it with all figures to benchmarks/results/.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import Field

from benchmarks import measure
from tost_lm.config import Section, run_program

OURS, NAIVE, COMPILED, SOFTMAX = "causal TSSA", "naive", "naive, compiled", "softmax attention"
RIVALS = (OURS, NAIVE, COMPILED, SOFTMAX)
FORWARD, BOTH = "forward", "forward + backward"
SIZES_MOVED = {FORWARD: 2, BOTH: 5}  # tensors of w's size that have to move: w, y; and w, dy, dw
SIZES_MOVED_BY_SOFTMAX = {FORWARD: 4, BOTH: 12}  # q, k, v, y; and q, k, v, y, dy, dq, dk, dv


class ShapeConfig(Section):
    """The size of w, [batch, tokens, heads, channels]."""

    batch: int = Field(default=1, gt=0)
    """Sequences."""
    heads: int = Field(default=12, gt=0)
    """Heads."""
    channels: int = Field(default=64, gt=0)
    """Channels of a head."""


class OperatorBenchmarkConfig(Section):
    """What `benchmarks.operator` reads."""

    shape: ShapeConfig = Field(default_factory=ShapeConfig)
    bench: measure.BenchConfig = Field(default_factory=measure.BenchConfig)


def main(path: Path | None, config: OperatorBenchmarkConfig) -> None:
    bench = config.bench.resolved()
    copy = measure.run_cell("benchmarks.operator_cells:copy_bandwidth", device=bench.device, limit_s=60)
    in_words = partial(described, copy["bytes_per_second"])
    rivals = {name: name for name in RIVALS}
    cells = measure.measure_table(
        "benchmarks.operator_cells", bench, (FORWARD, BOTH), rivals, in_words, **config.shape.model_dump()
    )
    shape = config.shape
    text = (
        f"{measure.markdown_table(table_rows(cells, in_words))}\n\n"
        f"w [{shape.batch}, tokens, {shape.heads}, {shape.channels}] in {bench.dtype}. Time; peak memory beyond the "
        f"inputs, in units of w; share of what a copy moves here, {copy['bytes_per_second'] / 1e9:.1f} GB/s. Times are "
        "medians of rounds in which the rivals take turns; ¹: a single call, too slow for turns. –: failed at a "
        "shorter length."
    )
    stored = measure.store("operator", bench.device, config, [{"work": "copy", **copy}, *cells], text)
    print(f"\n{text}\n\nwrote {stored}")


def table_rows(cells: Sequence[dict[str, Any]], in_words: Callable[[dict[str, Any]], str]) -> list[dict[str, str]]:
    """A row for each pass and length: a column for each rival, and how we compare with the naive form."""
    rows: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for cell in cells:
        rows.setdefault((cell["work"], cell["tokens"]), {})[cell["rival"]] = cell
    return [
        {
            "": work,
            "tokens": f"{tokens:,}",
            **{name: in_words(cell) for name, cell in row.items()},
            f"{NAIVE} ÷ ours": _ratio(row[NAIVE], row[OURS]),
        }
        for (work, tokens), row in rows.items()
    ]


def described(copied_bytes_per_second: float, cell: Mapping[str, Any]) -> str:
    """Time, memory and share of bandwidth of a cell in a few words."""
    if "failed" in cell:
        return cell["failed"]
    once = "¹" if len(cell["seconds"]) == 1 else ""
    seconds, w_bytes = median(cell["seconds"]), cell["w_bytes"]
    sizes = SIZES_MOVED_BY_SOFTMAX if cell["rival"] == SOFTMAX else SIZES_MOVED
    share = sizes[cell["work"]] * w_bytes / seconds / copied_bytes_per_second
    return f"{1e3 * seconds:,.3g} ms{once}, {cell['peak_bytes'] / w_bytes:.3g} w, {share:.0%}"


def _ratio(naive: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    if "failed" in naive or "failed" in ours:
        return "–"
    times = f"{median(naive['seconds']) / median(ours['seconds']):.3g} × time"
    if not ours["peak_bytes"]:  # too little to be seen
        return times
    return f"{times}, {naive['peak_bytes'] / ours['peak_bytes']:.3g} × memory"


if __name__ == "__main__":
    run_program(main, name="benchmarks.operator", doc=__doc__ or "", takes="[CONFIG]", config=OperatorBenchmarkConfig)
