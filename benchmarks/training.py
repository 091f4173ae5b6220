"""Throughput of a training step compared with a plain loop, and overhead of the engine around it.

    python -m benchmarks.training
    python -m benchmarks.training large.layers=2 large.width=256 large.heads=4 bench.rounds=3

Steps: forward, backward, clipping and AdamW of one sequence. Kinds take turns: ours (DeepSpeed on one rank, as in
`tost train`), also with `train.compile`; a plain loop around the same model; a plain loop around a transcription of the
published formulas, under autograd and under `torch.compile`, their default; and the plain loop without any operator,
which bounds the possible speed-up. Then ours and both plain loops around our model take turns in up to 100 more rounds,
which show what DeepSpeed and the operator cost. Engine: a run of `tost train` on one rank with everything on (log,
heartbeat, checksums, spike guard, async saves): the time beside the steps, and how long a save stops training. With the
defaults it takes about an hour on 2 CPU cores. Output: two tables, and all values in benchmarks/results/.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from pydantic import Field, model_validator

from benchmarks import measure
from tost_lm.config import Section, run_program, validate
from tost_lm.model.config import ModelConfig

OURS, COMPILED, LOOP, WITHOUT = "tost_lm", "tost_lm, compiled", "plain loop", "plain loop, no operator"
SPEED, ENGINE, OPERATOR = f"{OURS}, tokens/s", "cost of DeepSpeed", "cost of DeepSpeed and the operator"
CLOSE = {ENGINE: LOOP, OPERATOR: WITHOUT}
"""Costs of ours, as fractions of these steps."""
SHAPES = ("small", "long", "large")
PLAIN, PLAIN_COMPILED = "published formulas", "published formulas, compiled"


class ShapeConfig(measure.ModelShape):
    """A model of TSSA layers, and the sequence of a step."""

    tokens: int = Field(default=4096, gt=0)
    """Tokens of the sequence."""


class BenchConfig(measure.DeviceConfig):
    """Measurements, device and time limit."""

    rounds: int = Field(default=7, gt=0)
    """Timed steps of each kind, in turns."""
    engine_steps: int = Field(default=15, gt=4)
    """Steps of the run whose engine is timed; every third step is saved."""


class TrainingBenchmarkConfig(Section):
    """Settings of `benchmarks.training`."""

    small: ShapeConfig = ShapeConfig(layers=6, heads=6, width=384, tokens=1024)
    """A model so small that a sequence is short work beside the update of its weights."""
    long: ShapeConfig = ShapeConfig(layers=6, heads=6, width=384, tokens=16384)
    """The same model and a longer sequence."""
    large: ShapeConfig = ShapeConfig()
    """tost-base, whose time is mostly matrix products."""
    bench: BenchConfig = Field(default_factory=BenchConfig)

    @model_validator(mode="before")
    @classmethod
    def _keep_the_rest_of_a_shape(cls, given: dict[str, Any]) -> dict[str, Any]:
        """One setting of a shape leaves its other settings."""
        rest = {name: cls.model_fields[name].default for name in SHAPES if isinstance(given.get(name), dict)}
        return {**given, **{name: {**shape.model_dump(), **given[name]} for name, shape in rest.items()}}


def run(config: TrainingBenchmarkConfig, device: str) -> tuple[list[dict[str, Any]], str]:
    bench = config.bench
    shapes: dict[str, ShapeConfig] = {name: getattr(config, name) for name in SHAPES}
    models = {name: model_settings(shape) for name, shape in shapes.items()}
    for name, model in models.items():
        validate(ModelConfig, model, name)
    call = {"device": device, "limit_s": bench.cell_seconds}
    cells = []
    for name, shape in shapes.items():
        cell = measure.run_cell(
            "benchmarks.training_cells:steps_in_turns",
            model=models[name], tokens=shape.tokens, rounds=bench.rounds, **call,
        )  # fmt: skip
        cells.append({"work": "step", "shape": name, **shape.model_dump(), **cell})
        print("; ".join(f"{key} {value}" for key, value in step_row(cells[-1]).items()), flush=True)
    engine = measure.run_cell(
        "benchmarks.training_cells:engine_run",
        model=models["large"], tokens=config.large.tokens, steps=bench.engine_steps, **call,
    )  # fmt: skip
    text = (
        f"{measure.markdown_table([step_row(cell) for cell in cells])}\n\n"
        f"Medians of {bench.rounds} rounds; ratios of times are medians over rounds, of {PLAIN_COMPILED}. The "
        f"costs are medians of more rounds, with their 95% intervals, beside a {LOOP} and a {WITHOUT}.\n\n"
        f"## The engine\n\n{engine_text(engine)}"
    )
    return [*cells, {"work": "engine", **engine}], text


main = measure.benchmark("training", run)


def model_settings(shape: ShapeConfig) -> dict[str, Any]:
    """Settings of a model with learned positions for the whole sequence."""
    return {**shape.model_dump(exclude={"tokens"}), "pattern": "T", "max_positions": shape.tokens}


def step_row(cell: Mapping[str, Any]) -> dict[str, str]:
    """A row of the table of steps."""
    shape = f"{cell['layers']} layers, {cell['heads']} heads, width {cell['width']}, vocabulary {cell['vocab_size']:,}"
    row = {"shape": shape, "tokens": f"{cell['tokens']:,}"}
    rivals = (PLAIN, LOOP, OURS, COMPILED, WITHOUT)
    if "failed" in cell:
        return {**row, SPEED: cell["failed"], **dict.fromkeys([*CLOSE, *rivals], "")}
    seconds: dict[str, list[float]] = cell["seconds"]
    return {
        **row,
        SPEED: f"{cell['tokens'] / median(seconds[OURS]):,.0f}",
        **{name: _cost(cell["close"][OURS], cell["close"][rival]) for name, rival in CLOSE.items()},
        **{name: f"{_ratio(seconds[PLAIN_COMPILED], seconds[name]):.2f}" for name in rivals},
    }


def engine_text(engine: Mapping[str, Any]) -> str:
    """The time that a run of `tost train` spends beside its steps."""
    if "failed" in engine:
        return f"failed: {engine['failed']}"
    beside, alone = engine["steps_while_writing"], engine["step_seconds"]  # one may be empty: short steps, or few
    step = median(alone or beside)
    meanwhile = f"; the steps meanwhile take {median(beside) / step - 1:+.0%}" if alone and beside else ""
    parts = {"checksums": engine["checksum_seconds"], "hooks and reading": engine["other_seconds"]}
    overhead = sum(median(seconds) for seconds in parts.values()) / step
    saves = engine["save_seconds"]
    return (
        f"Of a step of {step:.2f} s, the engine adds {overhead:.1%}: "
        + ", ".join(f"{name} {median(seconds) / step:.2%}" for name, seconds in parts.items())
        + f". An async save of {engine['checkpoint_bytes'] / 1e9:.2f} GB stops training for "
        f"{median(saves):.2f} s, {median(saves) / step:.2f} steps, and is on disk {engine['write_seconds'][-1]:.1f} s "
        f"after its start{meanwhile}."
    )


def _cost(ours: Sequence[float], theirs: Sequence[float]) -> str:
    costs = [a / b - 1 for a, b in zip(ours, theirs, strict=True)]
    low, high = measure.median_interval(costs)
    return f"{median(costs):+.1%} ({low:+.1%} to {high:+.1%}, {len(costs)} rounds)"


def _ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    return median(a / b for a, b in zip(slow, fast, strict=False))


if __name__ == "__main__":
    run_program(
        main, name="benchmarks.training", doc=__doc__ or "", positional="[CONFIG]", config=TrainingBenchmarkConfig
    )
