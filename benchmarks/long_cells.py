"""What `benchmarks.long` does in processes of their own."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.measure import call_seconds, peak_bytes
from tost_lm.config import validate
from tost_lm.data.prefetch import MicroBatch
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
    """Seconds of the second step, and the most bytes that the process held until its end."""
    take = _step_of(device, model, tile_tokens)
    take(tokens)
    return {"seconds": call_seconds(lambda: take(tokens), device), "peak_bytes": peak_bytes(device)}


def in_turns(
    device: str, model: dict[str, Any], lengths: list[int], tile_tokens: int, rounds: int
) -> dict[str, dict[int, list[float]]]:
    """Seconds of a step, by length."""
    take = _step_of(device, model, tile_tokens)
    seconds: dict[int, list[float]] = {length: [] for length in lengths}
    for length in lengths:
        take(length)
    for _ in range(rounds):
        for length in lengths:
            steps = max(lengths) // length
            seconds[length].append(call_seconds(partial(_repeat, take, length, steps), device) / steps)
    return {"seconds": seconds}


def _repeat(take: Callable[[int], object], length: int, steps: int) -> None:
    for _ in range(steps):
        take(length)


def _step_of(device: str, model: dict[str, Any], tile_tokens: int | None) -> Callable[[int], object]:
    """Training on a sequence of as many random tokens as are asked for."""
    torch.manual_seed(0)
    settings = validate(ModelConfig, model, "benchmarks.long")
    mesh = build_mesh(start_world("cuda" if device == "cuda" else "cpu"), ParallelConfig())
    optim = OptimConfig()
    built = TiledLM(settings).to(mesh.device)
    engine = build_engine(
        built, build_adamw(built, optim), mesh, ParallelConfig(),
        micro_batch_sequences=1, accumulation=1, grad_clip=optim.grad_clip, bfloat16=device == "cuda",
    )  # fmt: skip

    def take(tokens: int) -> None:
        window = torch.randint(settings.vocab_size, (1, tokens + 1), device=mesh.device)
        batch = MicroBatch(window[:, :-1], window[:, 1:])
        train_step(engine, [batch], tile(mesh, tokens, tile_tokens), optim.lr)

    return take
