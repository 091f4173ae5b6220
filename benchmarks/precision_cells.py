"""Cells of `benchmarks.precision`."""

from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine import engine_of, python_sources, state_bytes_of
from benchmarks.measure import call_seconds
from tost_lm.config import validate
from tost_lm.data.prefetch import MicroBatch
from tost_lm.model import ModelConfig, TostLM
from tost_lm.optim.settings import OptimConfig, learning_rate
from tost_lm.pretrain.step import train_step
from tost_lm.pretrain.tiled import tile

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
