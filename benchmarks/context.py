"""Whether the tasks of the family `context` separate models that can use their context from models that cannot.

    python -m benchmarks.context
    python -m benchmarks.context 'bench.tasks=["copying@text"]' 'bench.patterns=["A", "AA"]'

A small model of each pattern is trained for each task, and measured on examples of another seed: in 32 shots, one
passage, and random tokens. Texts of context_gain repeat a random passage after more than half of the length.
Output: one table, and all values in benchmarks/results/.
"""

from typing import Any

from pydantic import Field

from benchmarks import measure
from tost_lm.config import Section, run_program
from tost_lm.markdown import with_error

STEPS = {
    "copying@text": 200,
    "context_gain@text": 200,
    "many_shot_seen@own-words": 600,
    "many_shot_unseen@own-words": 600,
    "passages@own-words": 300,
}
"""Training steps for each task."""


class BenchConfig(measure.DeviceConfig):
    """Tasks, models and training."""

    tasks: list[str] = Field(default=list(STEPS), min_length=1)
    """Tasks of the family `context`."""
    patterns: list[str] = Field(default=["D", "T"], min_length=1)
    """The mixers of the layers of each model."""
    width: int = Field(default=128, gt=0)
    """Channels of the models."""
    batch_size: int = Field(default=16, gt=0)
    """Examples of a training step."""
    lr: float = Field(default=4e-3, gt=0)
    """Learning rate after the warm-up."""
    samples: int = Field(default=400, gt=1)
    """Examples of the measurement."""


class ContextBenchmarkConfig(Section):
    """Settings of `benchmarks.context`."""

    bench: BenchConfig = BenchConfig()


def run(config: ContextBenchmarkConfig, device: str) -> tuple[list[dict[str, Any]], str]:
    bench, cells = config.bench, []
    chosen = bench.model_dump(include={"width", "batch_size", "lr", "samples"})
    for task in bench.tasks:
        for pattern in bench.patterns:
            own = {"task": task, "pattern": pattern, "steps": STEPS[task], **chosen}
            function = "benchmarks.context_cells:train_and_measure"
            cells.append(own | measure.run_cell(function, device=device, limit_s=bench.cell_seconds, **own))
            print(described(cells[-1]), flush=True)
    return cells, measure.markdown_table([described(cell) for cell in cells])


main = measure.benchmark("context", run)


def described(cell: dict[str, Any]) -> dict[str, str]:
    """A row of the table."""
    row = {"task": cell["task"], "layers": cell["pattern"], "steps": f"{cell['steps']:,}"}
    if "failed" in cell:
        return row | dict.fromkeys(("score", "control", "gain over control"), str(cell["failed"]))
    key = "token_accuracy" if cell["task"].endswith("@text") else "choice_accuracy"
    gain = with_error(cell["gain_over_control"], cell["gain_over_control_standard_error"], "+.3f")
    return row | {
        "score": with_error(cell[key], cell[f"{key}_standard_error"], ".1%"),
        "control": with_error(cell[f"control_{key}"], cell[f"control_{key}_standard_error"], ".1%"),
        "gain over control": gain,
    }


if __name__ == "__main__":
    run_program(
        main, name="benchmarks.context", doc=__doc__ or "", positional="[CONFIG]", config=ContextBenchmarkConfig
    )
