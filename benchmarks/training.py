"""Throughput of a training step compared with a plain loop, and overhead of the engine around it.

    python -m benchmarks.training
    python -m benchmarks.training large.layers=2 large.width=256 large.heads=4 bench.rounds=3

Steps: forward, backward, clipping and AdamW of one sequence. Kinds take turns: ours (DeepSpeed on one rank, as in
`tost train`), also with `train.compile`; a plain loop around the same model; a plain loop around a transcription of the
published formulas, under autograd and under `torch.compile`, their default; and the plain loop without any operator,
which bounds the possible speed-up. Then ours and both plain loops around our model take turns in up to 100 more rounds,
which show what DeepSpeed and the operator cost. Engine: a run of `tost train` on one rank with everything on (log,
heartbeat, checksums, spike guard, async saves): the time beside the steps, and how long a save stops training. With the
defaults it takes about an hour on 2 CPU cores. Output: two tables, and all values in results/benchmarks/.
"""

import contextlib
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor

import tost_lm.mixers.tssa.layer as mixer
from benchmarks import measure
from benchmarks.engine import engine_of
from benchmarks.measure import CHECKOUT, interleaved_seconds
from benchmarks.plain import plain_loop, plain_loss
from tost_lm.command_line import run_program
from tost_lm.config import Section, validate
from tost_lm.data.prefetch import MicroBatch
from tost_lm.model import ModelConfig
from tost_lm.model.lm import TostLM
from tost_lm.model.transforms import compile_blocks
from tost_lm.optim.settings import OptimConfig
from tost_lm.parallel.checksums import Checksums
from tost_lm.parallel.graceful_stop import GracefulStop
from tost_lm.pretrain import train
from tost_lm.pretrain.settings import PretrainConfig
from tost_lm.pretrain.start import find_start
from tost_lm.pretrain.step import train_step
from tost_lm.pretrain.tiled import TiledLM, tile

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
            "benchmarks.training:steps_in_turns",
            model=models[name], tokens=shape.tokens, rounds=bench.rounds, **call,
        )  # fmt: skip
        cells.append({"work": "step", "shape": name, **shape.model_dump(), **cell})
        print("; ".join(f"{key} {value}" for key, value in step_row(cells[-1]).items()), flush=True)
    engine = measure.run_cell(
        "benchmarks.training:engine_run",
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


SAVE_EVERY = 3
CLOSE_SECONDS = 480.0


def steps_in_turns(device: str, model: dict[str, Any], tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds of each step by rival, and those of ours and the rivals in `CLOSE` in more rounds (`close`)."""
    settings = validate(ModelConfig, model, "benchmarks.training")
    windows = torch.randint(settings.vocab_size, (1, tokens + 1), device=device)
    batch = MicroBatch(windows[:, :-1], windows[:, 1:])
    steps = {
        OURS: _our_step(settings, batch, device),
        COMPILED: _our_step(settings, batch, device, compile_blocks),
        **_plain_steps(settings, batch, device),
    }
    seconds = interleaved_seconds(steps, device, budget_s=float("inf"), repeats=rounds)
    close = {name: steps[name] for name in (OURS, *CLOSE.values())}
    return {"seconds": seconds, "close": interleaved_seconds(close, device, budget_s=CLOSE_SECONDS, repeats=100)}


def _our_step(
    settings: ModelConfig, batch: MicroBatch, device: str, prepare: Callable[[TostLM], object] = lambda model: None
) -> Callable[[], object]:
    engine = engine_of(settings, device, bfloat16=device == "cuda", prepare=prepare)
    return lambda: train_step(engine, [batch], tile(engine.mesh, batch.tokens.shape[1]), OptimConfig().lr)


def _plain_steps(settings: ModelConfig, batch: MicroBatch, device: str) -> dict[str, Callable[[], object]]:
    step = plain_loop(settings, device)

    def ours(model: TiledLM, tokens_BT: Tensor, labels_BT: Tensor) -> Tensor:
        loss = model(tokens_BT, labels=labels_BT, output_state=False).loss
        assert loss is not None
        return loss

    def without(model: TiledLM, tokens_BT: Tensor, labels_BT: Tensor) -> Tensor:
        with _operator(lambda w, *others, **options: (w, None)):
            return ours(model, tokens_BT, labels_BT)

    losses = {LOOP: ours, PLAIN: plain_loss, PLAIN_COMPILED: torch.compile(plain_loss), WITHOUT: without}
    return {name: partial(step, loss_of, batch) for name, loss_of in losses.items()}


@contextmanager
def _operator(operator: Callable[..., Any]) -> Iterator[None]:
    """Make the mixers call this function instead of the operator."""
    ours, mixer.causal_tssa = mixer.causal_tssa, operator
    try:
        yield
    finally:
        mixer.causal_tssa = ours


def engine_run(device: str, model: dict[str, Any], tokens: int, steps: int) -> dict[str, Any]:
    """How a real run spends its time, without its first three steps."""
    with tempfile.TemporaryDirectory(prefix="tost_lm_bench_") as folder, contextlib.redirect_stdout(io.StringIO()):
        os.chdir(folder)
        os.environ["WANDB_MODE"] = "offline"
        _make_shards(Path(folder))
        tree = {
            "model": model,
            "data": {"folder": "shards"},
            "train": {
                "steps": steps, "global_batch_size": 1, "micro_batch_size": 1, "seq_len": tokens,
                "dtype": "bfloat16" if device == "cuda" else "float32", "skip_spike_sigma": 6.0,
            },
            "checkpoint": {"interval": SAVE_EVERY, "keep_latest_k": 1},
            "run": {"name": "bench", "device": device, "log_interval": 1},
        }  # fmt: skip
        config = validate(PretrainConfig, tree, "benchmarks.training")
        clock = _Clock()
        with clock.reading():
            train.train(find_start(config), GracefulStop())
        newest = max(Path("runs/bench/checkpoints").glob("step_*"))
        size = sum(file.stat().st_size for file in newest.iterdir())
    return {**clock.figures(), "checkpoint_bytes": size}


class _Clock:
    """Times the phases of the loop by wrapping the functions that it calls."""

    def __init__(self) -> None:
        self._intervals: dict[str, list[tuple[float, float]]] = {
            phase: [] for phase in ("step", "before", "after", "save")
        }
        self._written: list[float] = []

    @contextmanager
    def reading(self) -> Iterator[None]:
        phases = [
            (train, "train_step", "step"),
            (Checksums, "before_update", "before"),
            (Checksums, "after_update", "after"),
            (train.Trainer, "save", "save"),
        ]
        originals = [getattr(owner, name) for owner, name, _ in phases]
        for (owner, name, phase), original in zip(phases, originals, strict=True):
            setattr(owner, name, self._timed(phase, original))
        try:
            yield
        finally:
            for (owner, name, _), original in zip(phases, originals, strict=True):
                setattr(owner, name, original)

    def _timed(self, phase: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            outcome = original(*arguments, **options)
            self._intervals[phase].append((start, time.perf_counter()))
            if phase == "save":
                self._written.append(arguments[0].writer.save_seconds)
            return outcome

        return timed

    def figures(self) -> dict[str, Any]:
        """Seconds of each phase of every step, without the first three and the last."""
        took = {phase: [end - start for start, end in intervals] for phase, intervals in self._intervals.items()}
        starts = [start for start, _ in self._intervals["step"]]
        saved = {step: number for number, step in enumerate(range(SAVE_EVERY - 1, len(starts), SAVE_EVERY))}
        write_starts = [self._intervals["save"][number][0] for number in saved.values()]
        write_ends = [start + self._written[-1] for start in write_starts]
        figures: dict[str, list[float]] = {"step_seconds": [], "checksum_seconds": [], "other_seconds": []}
        while_writing = []
        for step in range(3, len(starts) - 1):
            own = took["step"][step] - took["before"][step]
            rest = starts[step + 1] - starts[step] - own - took["before"][step] - took["after"][step]
            writing = any(begin < starts[step] < end for begin, end in zip(write_starts, write_ends, strict=True))
            (while_writing if writing else figures["step_seconds"]).append(own)
            figures["checksum_seconds"].append(took["before"][step] + took["after"][step])
            figures["other_seconds"].append(rest - took["save"][saved[step]] if step in saved else rest)
        saves = [took["save"][number] for number in saved.values()]
        return {**figures, "steps_while_writing": while_writing, "save_seconds": saves, "write_seconds": self._written}


def _make_shards(folder: Path) -> None:
    """Shards of the running Python's documentation and sources."""
    settings = ["tokenizer.path=tokenizer.model", "tokenizer.vocab_size=384", "tokenizer.sample_bytes=1_000_000"]
    settings += ["shards.folder=shards", "corpus.source=embedded", "corpus.valid_fraction=0.05"]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    for made in ("tokenizer", "shards"):
        command = [sys.executable, "-m", "tost_lm.cli.main", "prepare", made, *settings]
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)


if __name__ == "__main__":
    run_program(
        main, name="benchmarks.training", doc=__doc__ or "", positional="[CONFIG]", config=TrainingBenchmarkConfig
    )
