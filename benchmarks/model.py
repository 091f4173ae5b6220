"""Time and memory of whole models by context length: ToST and GPT-2.

    python -m benchmarks.model
    python -m benchmarks.model "bench.lengths=[1024, 8192]" shape.width=256 shape.layers=4

Two tasks from 1k to 1M tokens, as far as memory and bench.cell_seconds allow: a training step (forward and backward of
one sequence), and decoding one token after a context. The cost of decoding after the longest context is also measured
in turns with that after the shortest. The models have equal layers, heads, width and embeddings, and sinusoidal
positions; they differ in their mixers, and ToST has LayerScale. With the defaults, a small model, it takes about
10 minutes on 2 CPU cores. Output: one table, and all values in benchmarks/results/.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from pydantic import Field

from benchmarks import measure
from tost_lm.config import Section, run_program, validate
from tost_lm.model.config import ModelConfig

COMMON = {"positions": "sinusoidal", "tssa": {"denom_bias": "head"}}
RIVALS: dict[str, dict[str, Any]] = {
    "ToST": {"pattern": "T"},
    "GPT-2, flash attention": {"pattern": "A", "softmax": {"rope_theta": 0.0}, "layer_scale": 0.0},
    "GPT-2, plain attention": {"pattern": "A", "softmax": {"rope_theta": 0.0}, "layer_scale": 0.0},
}
ATTENTION = {"GPT-2, flash attention": "FLASH_ATTENTION", "GPT-2, plain attention": "MATH"}  # torch's names
TRAINING, DECODING = "training step", "decoding a token"
COST_OF_LENGTH = "decoding, longest ÷ shortest"


class ModelBenchmarkConfig(Section):
    """Settings of `benchmarks.model`."""

    shape: measure.ModelShape = measure.ModelShape(layers=2, heads=4, width=64, vocab_size=256)
    """A small vocabulary, so that the head, which is equal in all models, does not hide the mixers."""
    bench: measure.BenchConfig = Field(default_factory=measure.BenchConfig)


def run(config: ModelBenchmarkConfig, device: str) -> tuple[list[dict[str, Any]], str]:
    bench, shape = config.bench, config.shape
    settings = {name: {**COMMON, **model, **shape.model_dump()} for name, model in RIVALS.items()}
    for model in settings.values():
        validate(ModelConfig, model, "benchmarks.model")
    rivals = {name: {"settings": model, "attention": ATTENTION.get(name)} for name, model in settings.items()}
    cells = measure.measure_table("benchmarks.model_cells", bench, (TRAINING, DECODING), rivals, described)
    cells += [cell for name, rival in rivals.items() if (cell := cost_of_length(bench, cells, name, rival))]
    text = (
        f"{measure.markdown_table(table_rows(cells))}\n\n{shape.layers} layers, {shape.heads} heads, width "
        f"{shape.width}, vocabulary {shape.vocab_size}, {bench.resolved_dtype()}, one sequence. Training step: forward "
        "and backward; memory is the peak beyond the weights. Decoding: one token after a context of this many; "
        "memory is the state (GPT-2: the cache, which grows by copying). Times are medians of rounds in which the "
        "rivals take turns; ¹: a single call, too slow for turns. –: failed at a shorter length. ×: time at the "
        "longest context divided by time at the shortest, the median over rounds; and the same ratio of state bytes."
    )
    return cells, text


main = measure.benchmark("model", run)


def cost_of_length(
    bench: measure.BenchConfig, cells: Sequence[Mapping[str, Any]], name: str, rival: dict[str, Any]
) -> dict[str, Any] | None:
    """A rival's decoding after the longest and the shortest context, in turns in one process; None: fewer than two
    lengths were measured."""
    mine = [cell for cell in cells if (cell["work"], cell["rival"]) == (DECODING, name) and "failed" not in cell]
    if len(mine) < 2:
        return None
    lengths = [mine[0]["tokens"], mine[-1]["tokens"]]
    cell = measure.run_cell(
        "benchmarks.model_cells:contexts_in_turns", device=bench.resolved_device(), limit_s=2 * bench.cell_seconds,
        lengths=lengths, dtype=bench.resolved_dtype(), rival=rival, budget_s=bench.cell_seconds / 2,
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
    return f"{time}{once}, {measure.in_units(memory)}"


if __name__ == "__main__":
    run_program(main, name="benchmarks.model", doc=__doc__ or "", positional="[CONFIG]", config=ModelBenchmarkConfig)
