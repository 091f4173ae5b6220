"""The whole model, ToST against GPT-2 and, on a GPU, gated linear attention: time and memory by length of the context.

    python -m benchmarks.model
    python -m benchmarks.model "bench.lengths=[1024, 8192]" shape.width=256 shape.layers=4

A training step (forward and backward of one sequence) and the decoding of one token after a context, from 1k to 1M
tokens as far as memory and bench.cell_seconds allow; and what decoding costs after the longest context in units of the
shortest, the two measured in turns. The models differ in their mixers (and ToST has its LayerScale):
same layers, heads, width and embeddings, and sinusoidal positions, so that every length can be read. With the
defaults, a small model, it takes about 10 minutes on 2 CPU cores. Prints one table and writes it with all figures to
benchmarks/results/.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import Field

from benchmarks import measure
from tost_lm.config import Section, run_program, validate
from tost_lm.model.config import ModelConfig

COMMON = {"positions": "sinusoidal", "denom_bias": "head"}
RIVALS: dict[str, dict[str, Any]] = {
    "ToST": {"pattern": "T"},
    "GPT-2, flash attention": {"pattern": "A", "rope_theta": 0.0, "layer_scale": 0.0},
    "GPT-2, plain attention": {"pattern": "A", "rope_theta": 0.0, "layer_scale": 0.0},
}
ON_GPUS: dict[str, dict[str, Any]] = {"gated linear attention": {"pattern": "G", "layer_scale": 0.0}}
ATTENTION = {"GPT-2, flash attention": "FLASH_ATTENTION", "GPT-2, plain attention": "MATH"}  # torch's names
TRAINING, DECODING = "training step", "decoding a token"
COST_OF_LENGTH = "decoding, longest ÷ shortest"


class ShapeConfig(Section):
    """What all rivals have in common."""

    layers: int = Field(default=2, gt=0)
    """Blocks."""
    heads: int = Field(default=4, gt=0)
    """Heads of the mixers."""
    width: int = Field(default=64, gt=0)
    """Channels."""
    vocab_size: int = Field(default=256, gt=0)
    """Rows of the embedding; small, so that the head, which is the same in all, does not hide the mixers."""


class ModelBenchmarkConfig(Section):
    """What `benchmarks.model` reads."""

    shape: ShapeConfig = Field(default_factory=ShapeConfig)
    bench: measure.BenchConfig = Field(default_factory=measure.BenchConfig)


def main(path: Path | None, config: ModelBenchmarkConfig) -> None:
    bench = config.bench.resolved()
    rivals = {**RIVALS, **(ON_GPUS if bench.device == "cuda" else {})}
    settings = {name: {**COMMON, **model, **config.shape.model_dump()} for name, model in rivals.items()}
    for model in settings.values():
        validate(ModelConfig, model, "benchmarks.model")
    rivals = {name: {"settings": model, "attention": ATTENTION.get(name)} for name, model in settings.items()}
    cells = measure.measure_table("benchmarks.model_cells", bench, (TRAINING, DECODING), rivals, described)
    cells += [cell for name, rival in rivals.items() if (cell := cost_of_length(bench, cells, name, rival))]
    shape = config.shape
    text = (
        f"{measure.markdown_table(table_rows(cells))}\n\n"
        f"{shape.layers} layers, {shape.heads} heads, width {shape.width}, vocabulary {shape.vocab_size}, "
        f"{bench.dtype}, one sequence. Training step: forward and backward; memory is its peak beyond the weights. "
        "Decoding: one token after a context of so many, GPT-2's cache growing by a copy; memory is the state that is "
        "kept of them. Times are medians of rounds in which the rivals take turns; ¹: a single call, too slow for "
        "turns. –: failed at a shorter length. ×: the median of what a round at the longest context takes in units of "
        "the round before it at the shortest, and the same of the states' bytes."
    )
    print(f"\n{text}\n\nwrote {measure.store('model', bench.device, config, cells, text)}")


def cost_of_length(
    bench: measure.BenchConfig, cells: Sequence[Mapping[str, Any]], name: str, rival: dict[str, Any]
) -> dict[str, Any] | None:
    """The cell of a rival's decoding after the longest context beside the shortest, in turns in one process; None: it
    was measured at fewer than two lengths."""
    mine = [cell for cell in cells if (cell["work"], cell["rival"]) == (DECODING, name) and "failed" not in cell]
    if len(mine) < 2:
        return None
    lengths = [mine[0]["tokens"], mine[-1]["tokens"]]
    cell = measure.run_cell(
        "benchmarks.model_cells:contexts_in_turns", device=bench.device, limit_s=2 * bench.cell_seconds,
        lengths=lengths, dtype=bench.dtype, rival=rival, budget_s=bench.cell_seconds / 2,
    )  # fmt: skip
    return {"work": COST_OF_LENGTH, "tokens": lengths[1], "shortest_tokens": lengths[0], "rival": name, **cell}


def table_rows(cells: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """A row for each work and length, a column for each rival."""
    names = dict.fromkeys(cell["rival"] for cell in cells)
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for cell in cells:
        tokens = f"{cell['tokens']:,}" + (f" ÷ {cell['shortest_tokens']:,}" if "shortest_tokens" in cell else "")
        row = rows.setdefault((cell["work"], tokens), {"": cell["work"], "tokens": tokens, **dict.fromkeys(names, "–")})
        row[cell["rival"]] = described(cell)
    return list(rows.values())


def described(cell: Mapping[str, Any]) -> str:
    """Time and memory of a cell in a few words."""
    if "failed" in cell:
        return cell["failed"]
    if cell["work"] == COST_OF_LENGTH:
        ratio = median(longest / shortest for shortest, longest in zip(*cell["seconds"], strict=True))
        shortest_bytes, longest_bytes = cell["state_bytes"]
        return f"{ratio:.3g}×, {longest_bytes / shortest_bytes:.3g}×"
    once = "¹" if len(cell["seconds"]) == 1 else ""
    memory = cell["peak_bytes"] if cell["work"] == TRAINING else cell["state_bytes"]
    seconds = median(cell["seconds"])
    time = f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
    return f"{time}{once}, {_in_units(memory)}"


def _in_units(size: int) -> str:
    power = max(p for p in range(4) if size >= 1000**p or p == 0)
    return f"{size / 1000**power:.3g} {('B', 'kB', 'MB', 'GB')[power]}"


if __name__ == "__main__":
    run_program(main, name="benchmarks.model", doc=__doc__ or "", takes="[CONFIG]", config=ModelBenchmarkConfig)
