"""What a training step takes beside a plain loop, and what the engine around it costs.

    python -m benchmarks.training
    python -m benchmarks.training large.layers=2 large.width=256 large.heads=4 bench.rounds=3

Steps: forward, backward, clipping and AdamW of one sequence. Ours (DeepSpeed's ZeRO stage 1 on one rank, as
pretrain.train does it) and a plain loop around the same model with the published formulas under autograd in place of
the operator take turns, and so does the plain loop without any operator: how much faster a step could get at best.

Engine: a run of pretrain.train on one rank, with everything on (lines and rows of every step, heartbeat, checksums,
guard, asynchronous checkpoints): the share of the time that is not the step's own, and what a save stops it for.

With the defaults it takes about half an hour on 2 CPU cores. Prints the tables and writes them with all figures to
benchmarks/results/.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal

from pydantic import Field

from benchmarks import measure
from tost_lm.config import Section, run_program, validate
from tost_lm.model.config import ModelConfig

OURS, PLAIN, WITHOUT = "tost_lm", "plain loop", "plain loop, no operator"


class ShapeConfig(Section):
    """A model of TSSA layers, and the sequence that it is trained on."""

    layers: int = Field(gt=0)
    """Blocks."""
    heads: int = Field(gt=0)
    """Heads of the mixers."""
    width: int = Field(gt=0)
    """Channels."""
    vocab_size: int = Field(gt=0)
    """Rows of the embedding."""
    tokens: int = Field(gt=0)
    """Of the one sequence of a step."""


class BenchConfig(Section):
    """How it is measured."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """What to compute on; auto takes cuda if it is there, and there computes in bfloat16."""
    rounds: int = Field(default=7, gt=0)
    """Timed steps of each kind, in turns."""
    engine_steps: int = Field(default=15, gt=4)
    """Steps of the run whose engine is timed; every third is saved."""
    cell_seconds: float = Field(default=3600.0, gt=0)
    """No single process takes longer."""


class TrainingBenchmarkConfig(Section):
    """What `benchmarks.training` reads."""

    large: ShapeConfig = ShapeConfig(layers=12, heads=12, width=768, vocab_size=50304, tokens=4096)
    """tost-base, where matrix products take most of the time."""
    bound: ShapeConfig = ShapeConfig(layers=2, heads=4, width=256, vocab_size=256, tokens=131072)
    """A narrow model of a long sequence, where the operator does."""
    bench: BenchConfig = Field(default_factory=BenchConfig)


def main(path: Path | None, config: TrainingBenchmarkConfig) -> None:
    from tost_lm.evaluation.subject import pick_device

    bench = config.bench
    device = pick_device() if bench.device == "auto" else bench.device
    shapes = {"large": config.large, "bound": config.bound}
    models = {name: model_settings(shape) for name, shape in shapes.items()}
    for name, model in models.items():
        validate(ModelConfig, model, name)
    measure.RESULTS.mkdir(parents=True, exist_ok=True)  # whether it can be written to shows before the work
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
        f"Medians of {bench.rounds} rounds; the ratios are medians of the rounds' own. At best: a step whose operator "
        f"takes no time, against the plain loop.\n\n## The engine\n\n{engine_text(engine)}"
    )
    record = [*cells, {"work": "engine", **engine}]
    print(f"\n{text}\n\nwrote {measure.store('training', device, config, record, text)}")


def model_settings(shape: ShapeConfig) -> dict[str, Any]:
    """Of ModelConfig: positions as published, as many as the sequence has."""
    return {**shape.model_dump(exclude={"tokens"}), "pattern": "T", "max_positions": shape.tokens}


def step_row(cell: Mapping[str, Any]) -> dict[str, str]:
    """A line of the table of steps."""
    shape = f"{cell['layers']} layers, {cell['heads']} heads, width {cell['width']}, vocabulary {cell['vocab_size']:,}"
    if "failed" in cell:
        return {"shape": shape, "tokens": f"{cell['tokens']:,}", "tokens/s": cell["failed"]}
    seconds: dict[str, list[float]] = cell["seconds"]
    return {
        "shape": shape,
        "tokens": f"{cell['tokens']:,}",
        **{f"{name}, tokens/s": f"{cell['tokens'] / median(seconds[name]):,.0f}" for name in (OURS, PLAIN)},
        "ratio": f"{_ratio(seconds[PLAIN], seconds[OURS]):.2f}",
        "at best": f"{_ratio(seconds[PLAIN], seconds[WITHOUT]):.2f}",
    }


def engine_text(engine: Mapping[str, Any]) -> str:
    """What a run of pretrain.train spends beside its steps."""
    if "failed" in engine:
        return f"failed: {engine['failed']}"
    step = median(engine["step_seconds"])
    parts = {"checksums": engine["checksum_seconds"], "hooks and reading": engine["other_seconds"]}
    share = sum(median(seconds) for seconds in parts.values()) / step
    saves = engine["save_seconds"]
    return (
        f"Of a step of {step:.2f} s, the engine takes {share:.1%} more: "
        + ", ".join(f"{name} {median(seconds) / step:.2%}" for name, seconds in parts.items())
        + f". An asynchronous save of {engine['checkpoint_bytes'] / 1e9:.2f} GB stops training for "
        f"{median(saves):.2f} s, {median(saves) / step:.2f} steps, and is on disk {engine['write_seconds'][-1]:.1f} s "
        f"after it began; the steps meanwhile take {_ratio(engine['steps_while_writing'], [step] * 99) - 1:+.0%}."
    )


def _ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    return median(a / b for a, b in zip(slow, fast, strict=False))


if __name__ == "__main__":
    run_program(main, name="benchmarks.training", doc=__doc__ or "", takes="[CONFIG]", config=TrainingBenchmarkConfig)
