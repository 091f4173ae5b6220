"""Time and memory of losses for a large vocabulary, by number of tokens.

    python -m benchmarks.loss
    python -m benchmarks.loss shape.width=2048 "bench.lengths=[8192]"

From the input and the weight of the head to the gradients of both. Rivals: torch's linear_cross_entropy in tiles of its
own size and of ours, and whole logits. With the defaults it takes about 6 minutes on 2 CPU cores. Output: one table,
and all values in benchmarks/results/.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks import measure
from tost_lm.config import Section, run_program

OURS, TORCH, TORCH_BY_BYTES, WHOLE = "tost_lm", "torch, its tiles", "torch, our tiles", "whole logits"
RIVALS = (OURS, TORCH, TORCH_BY_BYTES, WHOLE)


class LossBenchmarkConfig(Section):
    """Settings of `benchmarks.loss`."""

    shape: measure.HeadShape = measure.HeadShape()
    bench: measure.BenchConfig = measure.BenchConfig(lengths=[1024, 4096, 16384], cell_seconds=240.0)


def run(config: LossBenchmarkConfig, device: str) -> tuple[list[dict[str, Any]], str]:
    bench, shape = config.bench, config.shape
    rivals = {name: name for name in RIVALS}
    cells = measure.measure_table(
        "benchmarks.loss_cells", bench, ("forward + backward",), rivals, described, **shape.model_dump()
    )
    text = (
        f"{measure.markdown_table(table_rows(cells))}\n\n{shape.width} channels, vocabulary {shape.vocab_size:,}, "
        f"{bench.resolved_dtype()}. Time, and peak memory beyond the inputs. Times are medians of rounds in which the "
        "rivals take turns; ¹: a single call. –: failed at fewer tokens."
    )
    return cells, text


main = measure.benchmark("loss", run)


def table_rows(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """A row for each number of tokens, a column for each rival."""
    rows: dict[int, dict[str, str]] = {}
    for cell in cells:
        rows.setdefault(cell["tokens"], {"tokens": f"{cell['tokens']:,}"})[cell["rival"]] = described(cell)
    return list(rows.values())


def described(cell: Mapping[str, Any]) -> str:
    """Time and memory of a cell in a few words."""
    if "failed" in cell:
        return cell["failed"]
    once = "¹" if len(cell["seconds"]) == 1 else ""
    return f"{median(cell['seconds']):.3g} s{once}, {cell['peak_bytes'] / 1e9:.2f} GB"


if __name__ == "__main__":
    run_program(main, name="benchmarks.loss", doc=__doc__ or "", positional="[CONFIG]", config=LossBenchmarkConfig)
