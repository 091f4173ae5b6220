"""Cells of `benchmarks.long`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.engine import engine_of
from benchmarks.measure import call_seconds, peak_bytes
from tost_lm.config import validate
from tost_lm.data.prefetch import MicroBatch
from tost_lm.model.config import ModelConfig
from tost_lm.optim.settings import OptimConfig
from tost_lm.pretrain.step import train_step
from tost_lm.pretrain.tiled import tile


def one_step(device: str, model: dict[str, Any], tokens: int, tile_tokens: int | None) -> dict[str, Any]:
    """Seconds of the second step, and peak memory of the process until its end."""
    train = step_of(device, model, tile_tokens)
    train(tokens)
    return {"seconds": call_seconds(lambda: train(tokens), device), "peak_bytes": peak_bytes(device)}


def in_turns(
    device: str, model: dict[str, Any], lengths: list[int], tile_tokens: int, rounds: int
) -> dict[str, dict[int, list[float]]]:
    """Seconds of a step, by length."""
    train = step_of(device, model, tile_tokens)
    seconds: dict[int, list[float]] = {length: [] for length in lengths}
    for length in lengths:
        train(length)
    for _ in range(rounds):
        for length in lengths:
            steps = max(lengths) // length
            seconds[length].append(call_seconds(partial(_repeat, train, length, steps), device) / steps)
    return {"seconds": seconds}


def _repeat(train: Callable[[int], object], length: int, steps: int) -> None:
    for _ in range(steps):
        train(length)


def step_of(device: str, model: dict[str, Any], tile_tokens: int | None) -> Callable[[int], object]:
    """A function that trains one step on a sequence of this many random tokens."""
    settings = validate(ModelConfig, model, "benchmarks.long")
    engine = engine_of(settings, device, bfloat16=device == "cuda")

    def train(tokens: int) -> None:
        window = torch.randint(settings.vocab_size, (1, tokens + 1), device=engine.mesh.device)
        batch = MicroBatch(window[:, :-1], window[:, 1:])
        train_step(engine, [batch], tile(engine.mesh, tokens, tile_tokens), OptimConfig().lr)

    return train
