"""The loss of a large vocabulary beside its rivals: time and memory of forward and backward, by the number of tokens.

    python -m benchmarks.loss
    python -m benchmarks.loss shape.width=2048 "bench.lengths=[8192]"

From the head's input and its weight to the gradients of both: ours, torch's linear_cross_entropy in portions as it
picks them and in portions as large as ours, and logits as a whole. With the defaults it takes about 6 minutes on 2 CPU
cores. Prints one table and writes it with all figures to benchmarks/results/.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import Field

from benchmarks import measure
from tost_lm.config import Section, run_program

OURS, TORCH, TORCH_BY_BYTES, WHOLE = "tost_lm", "torch, its portions", "torch, our portions", "whole logits"
RIVALS = (OURS, TORCH, TORCH_BY_BYTES, WHOLE)


class ShapeConfig(Section):
    """The size of the head."""

    width: int = Field(default=768, gt=0)
    """Channels of its input."""
    vocab_size: int = Field(default=50304, gt=0)
    """Words."""


class LossBenchmarkConfig(Section):
    """What `benchmarks.loss` reads."""

    shape: ShapeConfig = Field(default_factory=ShapeConfig)
    bench: measure.BenchConfig = measure.BenchConfig(lengths=[1024, 4096, 16384], cell_seconds=240.0)


def main(path: Path | None, config: LossBenchmarkConfig) -> None:
    bench, shape = config.bench.resolved(), config.shape
    rivals = {name: name for name in RIVALS}
    cells = measure.measure_table(
        "benchmarks.loss_cells", bench, ("forward + backward",), rivals, described, **shape.model_dump()
    )
    text = (
        f"{measure.markdown_table(table_rows(cells))}\n\n{shape.width} channels, {shape.vocab_size:,} words, "
        f"{bench.dtype}. Time, and peak memory beyond the inputs. Times are medians of rounds in which the rivals take "
        "turns; ¹: a single call. –: failed at fewer tokens."
    )
    print(f"\n{text}\n\nwrote {measure.store('loss', bench.device, config, cells, text)}")


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
    run_program(main, name="benchmarks.loss", doc=__doc__ or "", takes="[CONFIG]", config=LossBenchmarkConfig)
