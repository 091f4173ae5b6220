"""Cells of `benchmarks.long`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.measure import call_seconds, peak_bytes
from tost_lm.config import validate
from tost_lm.data.collation import MicroBatch
from tost_lm.model.config import ModelConfig
from tost_lm.optim.adamw import build_adamw
from tost_lm.optim.config import OptimConfig
from tost_lm.parallel.config import ParallelConfig
from tost_lm.parallel.mesh import build_mesh
from tost_lm.parallel.world import start_world
from tost_lm.parallel.zero import build_engine
from tost_lm.training.step import train_step
from tost_lm.training.tiled import TiledLM, tile


def one_step(device: str, model: dict[str, Any], tokens: int, tile_tokens: int | None) -> dict[str, Any]:
    """Seconds of the second step, and peak memory of the process until its end."""
    train = _step_of(device, model, tile_tokens)
    train(tokens)
    return {"seconds": call_seconds(lambda: train(tokens), device), "peak_bytes": peak_bytes(device)}


def in_turns(
    device: str, model: dict[str, Any], lengths: list[int], tile_tokens: int, rounds: int
) -> dict[str, dict[int, list[float]]]:
    """Seconds of a step, by length."""
    train = _step_of(device, model, tile_tokens)
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


def _step_of(device: str, model: dict[str, Any], tile_tokens: int | None) -> Callable[[int], object]:
    """A function that trains one step on a sequence of this many random tokens."""
    torch.manual_seed(0)
    settings = validate(ModelConfig, model, "benchmarks.long")
    mesh = build_mesh(start_world("cuda" if device == "cuda" else "cpu"), ParallelConfig())
    optim = OptimConfig()
    built = TiledLM(settings).to(mesh.device)
    engine = build_engine(
        built, build_adamw(built, optim), mesh, ParallelConfig(),
        micro_batch_size=1, accumulation=1, grad_clip=optim.grad_clip, bfloat16=device == "cuda",
    )  # fmt: skip

    def train(tokens: int) -> None:
        window = torch.randint(settings.vocab_size, (1, tokens + 1), device=mesh.device)
        batch = MicroBatch(window[:, :-1], window[:, 1:])
        train_step(engine, [batch], tile(mesh, tokens, tile_tokens), optim.lr)

    return train
