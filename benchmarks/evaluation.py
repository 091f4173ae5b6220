"""Time of zero-shot scoring, compared with one model call per request, and with lm-evaluation-harness.

    python -m benchmarks.evaluation bench.gpt2=gpt2_bpe sets.lambada_openai=lambada_test.jsonl \\
      sets.wikitext2=wiki.test.raw

The first passages of LAMBADA (lambada_openai@lm-eval) and the first pages of WikiText-2 (wikitext2@lm-eval), from text
to scores. A TSSA model runs in our scorer and one request at a time. GPT-2 of the same shape runs in our scorer and in
the harness's own class for Hugging Face models (which needs accelerate). Weights are drawn, which changes no time.
`at best` is the ratio that a scorer of only the necessary matrix products would reach. Output: one table, and all
values in benchmarks/results/.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import Field

from benchmarks import measure
from tost_lm.config import Section, run_program
from tost_lm.tasks.data_sets import DATA_SETS, Sets
from tost_lm.tasks.missing_word import passages
from tost_lm.tasks.perplexity import pages

OURS, ONE_BY_ONE, HARNESS = "tost_lm", "one by one, whole logits", "lm-evaluation-harness"
PRODUCTS = "products alone"


class ShapeConfig(Section):
    """Shape of both models."""

    layers: int = Field(default=12, gt=0)
    """Blocks."""
    heads: int = Field(default=12, gt=0)
    """Heads."""
    width: int = Field(default=768, gt=0)
    """Channels."""
    max_positions: int = Field(default=1024, gt=0)
    """Tokens of a window."""


class BenchConfig(measure.DeviceConfig):
    """Examples, rounds and tokenizer."""

    gpt2: Path
    """Folder with GPT-2's encoder.json and vocab.bpe."""
    passages: int = Field(default=60, gt=0)
    """Passages of LAMBADA."""
    pages: int = Field(default=2, gt=0)
    """Pages of WikiText-2."""
    rounds: int = Field(default=5, gt=0)
    """Timed calls of each kind, in turns."""


class EvaluationBenchmarkConfig(Section):
    """Settings of `benchmarks.evaluation`."""

    shape: ShapeConfig = Field(default_factory=ShapeConfig)
    sets: Sets = Field(default_factory=dict)
    """The files of test sets by name, in their published format."""
    bench: BenchConfig


def run(config: EvaluationBenchmarkConfig, device: str) -> tuple[list[dict[str, Any]], str]:
    bench = config.bench
    cells = []
    with TemporaryDirectory() as folder:
        for task in ("lambada_openai@lm-eval", "wikitext2@lm-eval"):
            data_set = task.split("@")[0]
            whole, file = DATA_SETS[data_set].find_file(config.sets).path, Path(folder, data_set)
            if data_set == "lambada_openai":
                examples, texts = bench.passages, [json.dumps({"text": text}) for text in passages(whole)]
            else:
                examples, texts = bench.pages, list(pages(whole))
            file.write_text("\n".join(texts[:examples]))
            for model in ("tost", "gpt2"):
                cell = measure.run_cell(
                    f"benchmarks.evaluation_cells:{model}", device=device, limit_s=bench.cell_seconds,
                    task=task, file=str(file), gpt2=str(bench.gpt2.absolute()), rounds=bench.rounds,
                    shape=config.shape.model_dump(),
                )  # fmt: skip
                cells.append({"task": task, "examples": examples, "of": model, **cell})
                print("; ".join(f"{key} {value}" for key, value in table_row(cells[-1]).items()), flush=True)
    shape = config.shape
    text = (
        f"{measure.markdown_table([table_row(cell) for cell in cells])}\n\n{shape.layers} layers, {shape.heads} heads, "
        f"width {shape.width}, vocabulary 50,304 (GPT-2: 50,257), windows of {shape.max_positions:,} tokens, float32. "
        f"Medians of {bench.rounds} rounds in turns; ratios are medians over rounds. At best: only the matrix "
        "products of the layers, and of the head where a token is scored."
    )
    return cells, text


main = measure.benchmark("evaluation", run)


def table_row(cell: Mapping[str, Any]) -> dict[str, str]:
    """A row of the table."""
    row = {
        "task": cell["task"],
        "model": {"tost": "TSSA", "gpt2": "GPT-2"}[cell["of"]],
        "examples": f"{cell['examples']:,}",
    }
    if "failed" in cell:
        columns = ("tokens", "rival", OURS, "the rival's", "ratio", "at best")
        return {**row, **dict.fromkeys(columns, "–"), "rival": cell["failed"]}
    seconds: dict[str, list[float]] = cell["seconds"]
    rival = next(name for name in seconds if name not in (OURS, PRODUCTS))
    return {
        **row,
        "tokens": f"{cell['tokens']:,}",
        "rival": rival,
        OURS: f"{median(seconds[OURS]):.3g} s",
        "the rival's": f"{median(seconds[rival]):.3g} s",
        "ratio": _ratio(seconds[rival], seconds[OURS]),
        "at best": _ratio(seconds[rival], seconds[PRODUCTS]) if PRODUCTS in seconds else "–",
    }


def _ratio(rival: Sequence[float], ours: Sequence[float]) -> str:
    return f"{median(a / b for a, b in zip(rival, ours, strict=True)):.2f}"


if __name__ == "__main__":
    run_program(
        main, name="benchmarks.evaluation", doc=__doc__ or "", positional="[CONFIG]", config=EvaluationBenchmarkConfig
    )
