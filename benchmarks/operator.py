"""Time, memory and bandwidth of token mixers and of their alternatives, by sequence length.

    python -m benchmarks.operator
    python -m benchmarks.operator "bench.lengths=[16384]" shape.heads=16

The gated delta rule is measured with its convolution and gates, as in a D layer of the same width. Rivals: the formulas
of TSSA as written under autograd ("naive", eager and under torch.compile), and causal softmax attention (torch's
scaled_dot_product_attention; flash attention where the device has it). Each runs forward and forward + backward, from
1k to 1M tokens as far as memory and bench.cell_seconds allow. Bandwidth is a fraction of that of a copy on the same
device; it counts the necessary traffic only: w and y forward, w, dy and dw backward (for the others their inputs and
gradients). On a CPU, TSSA is also timed beside a busy process, and the delta rule without its convolution beside its
matrix products alone. With the defaults it takes about 15 minutes on 2 CPU cores. Output: one table, and all values in
benchmarks/results/.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

from pydantic import Field

from benchmarks import measure
from tost_lm.config import Section, run_program

OURS, DELTA = "causal TSSA", "gated delta rule"
NAIVE, COMPILED, SOFTMAX = "naive", "naive, compiled", "softmax attention"
RIVALS = (OURS, DELTA, NAIVE, COMPILED, SOFTMAX)
FORWARD, BOTH = "forward", "forward + backward"
BUSY = "forward + backward, beside a busy process"
PRODUCTS = "forward + backward, without convolution"
SIZES_MOVED = {FORWARD: 2, BOTH: 5}  # tensors of w's size that have to move: w, y; and w, dy, dw
SIZES_MOVED_BY_DELTA = {FORWARD: 4, BOTH: 11}  # q, k, v, y; and q, k, v, dy, dq, dk, dv
SIZES_MOVED_BY_SOFTMAX = {FORWARD: 4, BOTH: 12}  # q, k, v, y; and q, k, v, y, dy, dq, dk, dv


class ShapeConfig(Section):
    """Shape of w, [batch, tokens, heads, channels]."""

    batch: int = Field(default=1, gt=0)
    """Sequences."""
    heads: int = Field(default=12, gt=0)
    """Heads."""
    channels: int = Field(default=64, gt=0)
    """Channels of a head."""
    busy_tokens: int = Field(default=16384, gt=0)
    """Tokens of the calls beside a busy process and beside matrix products."""


class OperatorBenchmarkConfig(Section):
    """Settings of `benchmarks.operator`."""

    shape: ShapeConfig = Field(default_factory=ShapeConfig)
    bench: measure.BenchConfig = Field(default_factory=measure.BenchConfig)


def run(config: OperatorBenchmarkConfig, device: str) -> tuple[list[dict[str, Any]], str]:
    shape = config.shape.model_dump(exclude={"busy_tokens"})
    copy = measure.run_cell("benchmarks.operator_cells:copy_bandwidth", device=device, limit_s=60)
    in_words = partial(described, copy["bytes_per_second"])
    rivals = {name: name for name in RIVALS}
    cells = measure.measure_table("benchmarks.operator_cells", config.bench, (FORWARD, BOTH), rivals, in_words, **shape)
    dtype = config.bench.resolved_dtype()
    text = (
        f"{measure.markdown_table(table_rows(cells, in_words))}\n\n"
        f"w [{shape['batch']}, tokens, {shape['heads']}, {shape['channels']}] in {dtype}. Time; peak memory beyond the "
        f"inputs, in units of w; fraction of the bandwidth of a copy, {copy['bytes_per_second'] / 1e9:.1f} GB/s. Times "
        "are medians of rounds in which the rivals take turns; ¹: a single call, too slow for turns. –: failed at a "
        "shorter length."
    )
    if device == "cpu":
        call = {"device": device, "limit_s": config.bench.cell_seconds, "tokens": config.shape.busy_tokens}
        busy, products = (
            measure.run_cell(f"benchmarks.operator_cells:{cell}", dtype=dtype, **call, **shape)
            for cell in ("beside_a_busy_process", "beside_its_products")
        )
        cells.append({"work": BUSY, "tokens": config.shape.busy_tokens, "rival": OURS, **busy})
        cells.append({"work": PRODUCTS, "tokens": config.shape.busy_tokens, "rival": DELTA, **products})
        text += f"\n\n{busy_line(cells[-2])}\n\n{products_line(cells[-1])}"
    return [{"work": "copy", **copy}, *cells], text


main = measure.benchmark("operator", run)


def busy_line(cell: Mapping[str, Any]) -> str:
    """How much another process slows the operator down."""
    if "failed" in cell:
        return f"{BUSY}: {cell['failed']}"
    quiet, busy = (median(cell[key]) for key in ("quiet_seconds", "seconds"))
    return (
        f"{OURS}, {cell['tokens']:,} tokens, {BUSY}: {1e3 * busy:,.3g} ms, {busy / quiet:.2f} × the quiet time, with "
        f"{cell['threads']} threads and {cell['wait_policy']} waiting."
    )


def products_line(cell: Mapping[str, Any]) -> str:
    """How much time the delta rule needs beyond that of its matrix products."""
    if "failed" in cell:
        return f"{PRODUCTS}: {cell['failed']}"
    products, whole = (median(cell[key]) for key in ("product_seconds", "seconds"))
    return (
        f"{DELTA}, {cell['tokens']:,} tokens, {PRODUCTS}: {1e3 * whole:,.4g} ms, {whole / products:.2f} × the time of "
        f"its matrix products alone, {1e3 * products:,.4g} ms."
    )


def table_rows(cells: Sequence[dict[str, Any]], in_words: Callable[[dict[str, Any]], str]) -> list[dict[str, str]]:
    """A row for each pass and length, a column for each rival, and the ratio of naive to ours."""
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
    """Time, memory and bandwidth of a cell in a few words."""
    if "failed" in cell:
        return cell["failed"]
    once = "¹" if len(cell["seconds"]) == 1 else ""
    seconds, w_bytes = median(cell["seconds"]), cell["w_bytes"]
    sizes = {DELTA: SIZES_MOVED_BY_DELTA, SOFTMAX: SIZES_MOVED_BY_SOFTMAX}.get(cell["rival"], SIZES_MOVED)
    bandwidth = sizes[cell["work"]] * w_bytes / seconds / copied_bytes_per_second
    return f"{1e3 * seconds:,.3g} ms{once}, {cell['peak_bytes'] / w_bytes:.3g} w, {bandwidth:.0%}"


def _ratio(naive: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    if "failed" in naive or "failed" in ours:
        return "–"
    times = f"{median(naive['seconds']) / median(ours['seconds']):.3g} × time"
    if not ours["peak_bytes"]:  # too little to measure
        return times
    return f"{times}, {naive['peak_bytes'] / ours['peak_bytes']:.3g} × memory"


if __name__ == "__main__":
    run_program(
        main, name="benchmarks.operator", doc=__doc__ or "", positional="[CONFIG]", config=OperatorBenchmarkConfig
    )
