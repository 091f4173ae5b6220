"""Accuracy of bfloat16: the error of the last hidden state, and losses compared with float32.

    python -m benchmarks.precision
    python -m benchmarks.precision train.steps=2000 shape.width=768 shape.layers=12 shape.heads=12

Hidden state: a new model with weights in bfloat16 beside the same weights in float32, for several initial values of
LayerScale. The error is a fraction of what the blocks add to the embedding. Losses: training on the sources of Python's
standard library, byte by byte, with equal initial weights and batches. Refuted if an error is over 2 %, or if the
difference of the losses at the end is over 1 % of the loss. With the defaults it takes about 15 minutes on 2 CPU cores,
which multiply bfloat16 matrices slowly. Output: two tables, and all values in results/benchmarks/.
"""

from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import mean, median, stdev
from typing import Any

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from benchmarks import measure
from benchmarks.engine import engine_of, python_sources, state_bytes_of
from benchmarks.measure import call_seconds
from tost_lm.command_line import run_program
from tost_lm.config import Section, validate
from tost_lm.data.prefetch import MicroBatch
from tost_lm.model import ModelConfig, TostLM
from tost_lm.optim.settings import OptimConfig, learning_rate
from tost_lm.pretrain.step import train_step
from tost_lm.pretrain.tiled import tile

DTYPES = ("float32", "bfloat16")
ERROR_LIMIT, LOSS_LIMIT = 0.02, 0.01
ROWS = 5


class TrainSection(Section):
    """Training in both data types."""

    steps: int = Field(default=500, gt=0)
    """Optimizer steps."""
    warmup_steps: int = Field(default=20, ge=0)
    """Steps of linear warm-up."""
    lr: float = Field(default=1e-3, gt=0)
    """Learning rate after the warm-up."""
    seeds: int = Field(default=3, gt=0)
    """Runs in each data type, in pairs with equal weights and batches."""
    seq_len: int = Field(default=256, gt=0)
    """Tokens of a sequence."""
    batch: int = Field(default=8, gt=0)
    """Sequences of a step."""


class PrecisionBenchmarkConfig(Section):
    """Settings of `benchmarks.precision`."""

    shape: measure.ModelShape = measure.ModelShape(layers=4, heads=4, width=64, vocab_size=256)
    layer_scales: list[PositiveFloat] = Field(default=[1e-5, 1e-4, 1e-3, 1e-2], min_length=1)
    """Initial values of LayerScale."""
    train: TrainSection = TrainSection()
    bench: measure.DeviceConfig = measure.DeviceConfig()


def run(config: PrecisionBenchmarkConfig, device: str) -> tuple[list[dict[str, Any]], str]:
    call = {"device": device, "limit_s": config.bench.cell_seconds, "model": model_settings(config)}
    tokens = config.train.seq_len
    errors = measure.run_cell(
        "benchmarks.precision:hidden_errors", layer_scales=config.layer_scales, tokens=tokens, **call
    )
    print(error_text(errors), flush=True)
    cells = []
    for seed in range(config.train.seeds):
        for dtype in DTYPES:
            training = {**config.train.model_dump(exclude={"seeds"}), "seed": seed, "dtype": dtype}
            cell = measure.run_cell("benchmarks.precision:losses", train=training, **call)
            cells.append({"seed": seed, "dtype": dtype, **cell})
            print(f"seed {seed}, {dtype}: {cell.get('failed') or cell['losses'][-1]}", flush=True)
    return [
        {"work": "hidden state", **errors},
        *cells,
    ], f"{error_text(errors)}\n\n{loss_text(cells, config.train.steps)}"


main = measure.benchmark("precision", run)


def model_settings(config: PrecisionBenchmarkConfig) -> dict[str, Any]:
    """A model with learned positions for the sequence."""
    return {**config.shape.model_dump(), "max_positions": config.train.seq_len}


def error_text(errors: Mapping[str, Any]) -> str:
    """A row for each initial value of LayerScale."""
    if "failed" in errors:
        return f"hidden state: {errors['failed']}"
    rows = [
        {
            "LayerScale": f"{row['layer_scale']:g}",
            "blocks ÷ embedding": f"{row['added']:.3g}",
            "error of the last hidden state ÷ what the blocks add": f"{row['error']:.2%}",
        }
        for row in errors["rows"]
    ]
    worst = max(row["error"] for row in errors["rows"])
    verdict = f"Largest error {worst:.2%}; limit {ERROR_LIMIT:.0%}: {_met(worst <= ERROR_LIMIT)}."
    return f"{measure.markdown_table(rows)}\n\n{verdict}"


def loss_text(cells: Sequence[Mapping[str, Any]], steps: int) -> str:
    """Losses at several steps with the difference of the pairs and its standard error; memory and time."""
    if failed := [cell for cell in cells if "failed" in cell]:
        return f"losses: {failed[0]['failed']}"
    by_dtype = {dtype: [cell for cell in cells if cell["dtype"] == dtype] for dtype in DTYPES}
    blocks = len(cells[0]["losses"])
    ends = range(blocks, 0, -max(1, blocks // ROWS))
    rows = [_loss_row(end, steps * end // blocks, by_dtype) for end in reversed(ends)]
    wide, narrow = (_means(by_dtype[dtype], blocks) for dtype in DTYPES)
    last = abs(mean(narrow) - mean(wide)) / mean(wide)
    sizes = [measure.in_units(by_dtype[dtype][0]["state_bytes"]) for dtype in DTYPES]
    times = [median(cell["seconds"] for cell in by_dtype[dtype]) for dtype in DTYPES]
    return (
        f"{measure.markdown_table(rows)}\n\nNats per byte, means of {len(wide)} pairs over a tenth of the steps; "
        f"± standard error of the pairs. Difference at the end {last:.2%} of the loss; limit {LOSS_LIMIT:.0%}: "
        f"{_met(last <= LOSS_LIMIT)}. Weights and optimizer state: {sizes[0]} in float32, {sizes[1]} in bfloat16. "
        f"Time of a step: {1e3 * times[0]:.3g} and {1e3 * times[1]:.3g} ms."
    )


def _loss_row(end: int, step: int, by_dtype: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, str]:
    wide, narrow = (_means(by_dtype[dtype], end) for dtype in DTYPES)
    differences = [a - b for a, b in zip(narrow, wide, strict=True)]
    error = f" ± {stdev(differences) / sqrt(len(differences)):.4f}" if len(differences) > 1 else ""
    return {
        "step": f"{step}",
        "float32": f"{mean(wide):.4f}",
        "bfloat16": f"{mean(narrow):.4f}",
        "difference": f"{mean(differences):+.4f}{error}",
    }


def _means(cells: Sequence[Mapping[str, Any]], end: int) -> list[float]:
    """The mean loss of each run over the tenth of its blocks before `end`, since a single batch is noisy."""
    return [mean(cell["losses"][max(0, end - max(1, len(cell["losses"]) // 10)) : end]) for cell in cells]


def _met(met: bool) -> str:
    return "met" if met else "not met"


CORPUS_BYTES = 4_000_000
BLOCKS = 50
AS_ACCURATE = 4


def hidden_errors(device: str, model: dict[str, Any], layer_scales: list[float], tokens: int) -> dict[str, Any]:
    """For each LayerScale: `error`, the norm of the difference between the last hidden state in bfloat16 and with the
    same weights in float32, as a fraction of what the blocks add; and `added`, that as a fraction of the embedding."""
    rows = []
    for layer_scale in layer_scales:
        torch.manual_seed(0)
        lm = TostLM(validate(ModelConfig, {**model, "layer_scale": layer_scale}, "benchmarks.precision")).to(device)
        ids_BT = torch.randint(lm.config.vocab_size, (4, tokens), device=device)
        _, narrow = _first_and_last(lm.bfloat16(), ids_BT)
        first, wide = _first_and_last(lm.float(), ids_BT)
        added = (wide - first).norm()
        error = float((narrow - wide).norm() / added)
        rows.append({"layer_scale": layer_scale, "error": error, "added": float(added / first.norm())})
    return {"rows": rows}


@torch.no_grad()
def _first_and_last(lm: TostLM, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The residual stream before the first block and after the last."""
    found: list[Tensor] = []
    read = lambda _, inputs: found.append(inputs[0].double())
    hooks = [module.register_forward_pre_hook(read) for module in (lm.blocks[0], lm.norm)]
    lm(ids_BT)
    for hook in hooks:
        hook.remove()
    first, last = found
    return first, last


def losses(device: str, model: dict[str, Any], train: dict[str, Any]) -> dict[str, Any]:
    """Mean losses of BLOCKS equal parts of the training, the median seconds of a step, and bytes of weights and
    optimizer state."""
    settings = validate(ModelConfig, model, "benchmarks.precision")
    steps, T = train["steps"], train["seq_len"]
    optim = OptimConfig(lr=train["lr"], min_lr=train["lr"] / 10, warmup_steps=train["warmup_steps"])
    engine = engine_of(settings, device, bfloat16=train["dtype"] == "bfloat16", optim=optim, seed=train["seed"])
    corpus, generator = python_sources(CORPUS_BYTES), torch.Generator().manual_seed(train["seed"])
    each: list[float] = []
    seconds: list[float] = []
    for step in range(steps):
        starts = torch.randint(len(corpus) - T, (train["batch"],), generator=generator)
        windows = torch.stack([corpus[start : start + T + 1] for start in starts]).long().to(device)
        batch = MicroBatch(windows[:, :-1], windows[:, 1:])

        def one_step(batch: MicroBatch = batch, step: int = step) -> None:
            outcome = train_step(engine, [batch], tile(engine.mesh, T), learning_rate(step, steps, optim))
            each.append(outcome.loss)

        seconds.append(call_seconds(one_step, device))
    width = max(1, steps // BLOCKS)
    means = [mean(each[start : start + width]) for start in range(0, steps - width + 1, width)]
    return {"losses": means, "seconds": median(seconds), "state_bytes": state_bytes_of(engine)}


if __name__ == "__main__":
    run_program(
        main, name="benchmarks.precision", doc=__doc__ or "", positional="[CONFIG]", config=PrecisionBenchmarkConfig
    )
