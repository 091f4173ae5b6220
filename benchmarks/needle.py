"""Time of the task needle@keys, compared with reading each of its prompts whole.

    python -m benchmarks.needle
    python -m benchmarks.needle bench.model=recall "bench.lengths=[4096]"

The model has the form of a recipe; its weights are drawn, which changes no time. The texts are Python's documentation,
a token for each byte. All questions and controls of a text continue from its state, or each one reads the text again.
Every score of both must be equal. Output: one table, and all values in results/benchmarks/.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from pydantic import Field, PositiveInt

from benchmarks import measure
from benchmarks.measure import interleaved_seconds
from tost_lm.command_line import run_program
from tost_lm.config import Section, find_recipe, read_toml, validate
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.model import ModelConfig, TostLM
from tost_lm.tasks.answers import Scores, model_scorer
from tost_lm.tasks.haystacks import Text
from tost_lm.tasks.needle import FORM, NAME
from tost_lm.tasks.queries import AskedText, HaystackConfig, KeyedQueries, QuerySource

ONCE, WHOLE = "each text once", "each prompt whole"


class BenchConfig(measure.DeviceConfig):
    """Model, texts and rounds."""

    model: Path = Path("demo")
    """A recipe, whose model is measured."""
    lengths: list[PositiveInt] = Field(default=[4096, 16384], min_length=1)
    """Tokens of text, question and answer together."""
    texts: int = Field(default=2, gt=0)
    """Texts of each length, each with five questions and five controls."""
    rounds: int = Field(default=3, gt=0)
    """Timed calls of each kind, in turns."""


class NeedleBenchmarkConfig(Section):
    """Settings of `benchmarks.needle`."""

    bench: BenchConfig = BenchConfig()


class Bytes(Tokenizer):
    """A token for each byte, after the end of text."""

    vocab_size, eot, stop = 257, 0, 0

    def encode(self, text: str) -> list[int]:
        return [1 + byte for byte in text.encode()]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i - 1 for i in ids if i).decode(errors="replace")


def run(config: NeedleBenchmarkConfig, device: str) -> tuple[list[dict[str, Any]], str]:
    bench, cells = config.bench, []
    model = read_toml(find_recipe(bench.model))["model"] | {"vocab_size": Bytes.vocab_size}
    for length in bench.lengths:
        cell = measure.run_cell(
            "benchmarks.needle:needle",
            device=device, limit_s=bench.cell_seconds, model=model, length=length, texts=bench.texts,
            rounds=bench.rounds,
        )  # fmt: skip
        cells.append({"length": length, **cell})
        print("; ".join(f"{key} {value}" for key, value in table_row(cells[-1]).items()), flush=True)
    text = (
        f"{measure.markdown_table([table_row(cell) for cell in cells])}\n\nThe model of the recipe {bench.model}, "
        f"{bench.texts} texts of each length, five questions and five controls of each, all scores equal. Rounds in "
        f"turns: {bench.rounds}; times and the ratio are medians over them."
    )
    return cells, text


main = measure.benchmark("needle", run)


def table_row(cell: Mapping[str, Any]) -> dict[str, str]:
    """A row of the table."""
    row = {"tokens": f"{cell['length']:,}"}
    if "failed" in cell:
        return {**row, ONCE: cell["failed"], WHOLE: "–", "ratio": "–"}
    once, whole = (cell["seconds"][name] for name in (ONCE, WHOLE))
    ratio = median(b / a for a, b in zip(once, whole, strict=True))
    return {**row, ONCE: f"{median(once):.3g} s", WHOLE: f"{median(whole):.3g} s", "ratio": f"{ratio:.2f}"}


def needle(device: str, model: dict[str, Any], length: int, texts: int, rounds: int) -> dict[str, Any]:
    """Seconds of scoring the texts in both ways."""
    torch.manual_seed(0)
    own = {**model, "max_positions": max(length, model.get("max_positions", 0))}
    lm, tokenizer = TostLM(validate(ModelConfig, own, "benchmarks.needle")).to(device).eval(), Bytes(b"")
    source = QuerySource("needle", HaystackConfig(samples=texts), tokenizer, lambda: Text.embedded(tokenizer))
    queries, score = KeyedQueries(NAME, source, FORM), model_scorer(lm, tokenizer.vocab_size)
    asked = [queries.asked(length, sample) for sample in range(texts)]
    questions = [[AskedText(one.context, (one.asked[i],)) for one in asked] for i in range(len(asked[0].asked))]
    scores: dict[str, list[Scores]] = {}

    def once() -> None:
        scores[ONCE] = score(asked, queries.room)

    def whole() -> None:
        scores[WHOLE] = [own for prompts in questions for own in score(prompts, queries.room)]

    seconds = interleaved_seconds({ONCE: once, WHOLE: whole}, device, budget_s=float("inf"), repeats=rounds)
    for one, other in zip(scores[ONCE], scores[WHOLE], strict=True):
        assert one.generated == other.generated
        np.testing.assert_array_equal(one.nats, other.nats)
        np.testing.assert_array_equal(one.top_share, other.top_share)
    return {"seconds": seconds}


if __name__ == "__main__":
    run_program(main, name="benchmarks.needle", doc=__doc__ or "", positional="[CONFIG]", config=NeedleBenchmarkConfig)
