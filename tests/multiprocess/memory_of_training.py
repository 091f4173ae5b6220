"""Peak memory of a rank that trains, and its messages in a step: real steps of a real model on gloo ranks."""

import ctypes
import gc
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tost_lm.checkpointing.reading import restore
from tost_lm.config import validate
from tost_lm.data.prefetch import MicroBatch
from tost_lm.parallel.mesh import Mesh, build_mesh, start_world
from tost_lm.pretrain.batches import tiling_of
from tost_lm.pretrain.engine import build_training_engine
from tost_lm.pretrain.settings import PretrainConfig
from tost_lm.pretrain.step import train_step
from tost_lm.testing import Traffic

Settings = dict[str, dict[str, Any]]
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


class Measured(NamedTuple):
    """The measurement of one rank."""

    peak_bytes: int
    """The most that was resident in a step, beyond what the process had before the model was built."""
    sent: dict[str, tuple[int, int]]
    """Calls and bytes handed over in a step, by kind of collective."""


def settings_of(
    *,
    width: int = 256,
    layers: int = 4,
    heads: int = 4,
    vocab_size: int = 8192,
    tokens: int = 1024,
    micro_batch: int = 4,
    micro_batches: int = 1,
    data_ranks: int = 1,
    dtype: str = "float32",
    parallel: dict[str, Any] | None = None,
    memory: dict[str, Any] | None = None,
    **model: Any,
) -> Settings:
    return {
        "model": {
            "width": width, "layers": layers, "heads": heads, "vocab_size": vocab_size, "max_positions": tokens,
            **model,
        },
        "data": {"folder": "none"},
        "train": {
            "steps": 9, "seq_len": tokens, "micro_batch_size": micro_batch,
            "global_batch_size": micro_batch * micro_batches * data_ranks, "dtype": dtype,
        },
        "parallel": parallel or {}, "memory": memory or {},
        "run": {"name": "r", "device": "cpu"},
    }  # fmt: skip


def after_small_steps(settings: Settings, steps: int) -> tuple[PretrainConfig, Mesh, int]:
    """What is resident after steps of a small model: what torch, DeepSpeed and megatron-core take once is not the
    model's.

    glibc gives what is freed back at once here; else it would keep some for later, as much as it happens to.
    """
    _return_freed_memory()
    config = validate(PretrainConfig, settings, "test")
    mesh = build_mesh(start_world("cpu"), config.parallel)
    train_steps(steps, _small(settings), mesh)
    gc.collect()
    return config, mesh, _resident("VmRSS")


def train_measured(settings: Settings) -> Measured:
    return train_steps(2, *after_small_steps(settings, 2))


def start_measured(settings: Settings, checkpoint: Path | None) -> int:
    """The most that is resident until a rank has drawn its weights or resumed, beyond what it had before."""
    config, mesh, before = after_small_steps(settings, 1)
    _forget_peak()
    engine = build_training_engine(config, mesh)
    if checkpoint:
        restore(engine, checkpoint)
    else:
        engine.draw_weights()
    return _resident("VmHWM") - before


def train_steps(steps: int, config: PretrainConfig, mesh: Mesh, before: int = 0) -> Measured:
    engine, tiling = build_training_engine(config, mesh), tiling_of(config, mesh)
    engine.draw_weights()
    shape = (config.train.micro_batch_size, config.train.seq_len)
    columns = torch.cat([torch.arange(*tile.columns) for tile in tiling.tiles])
    micro_batches = range(config.accumulation(dist.get_world_size()))
    batches = [torch.randint(config.model.vocab_size, shape)[:, columns] for _ in micro_batches]
    peak = 0
    for _ in range(steps):
        _forget_peak()
        train_step(engine, [MicroBatch(tokens, tokens, None) for tokens in batches], tiling, 1e-3)
        peak = _resident("VmHWM") - before
    with Traffic() as traffic:
        train_step(engine, [MicroBatch(tokens, tokens, None) for tokens in batches], tiling, 1e-3)
    sent: dict[str, tuple[int, int]] = {}
    for message in traffic.sent:
        calls, size = sent.get(message.kind, (0, 0))
        sent[message.kind] = (calls + 1, size + message.bytes)
    return Measured(peak, sent)


def _small(settings: Settings) -> PretrainConfig:
    """The same code with next to no memory."""
    model = settings["model"]
    shape = {"layers": len(model.get("pattern", "T")), "width": 16 * model["heads"], "vocab_size": 64}
    model = {**model, **shape, "max_positions": 64}
    train = {**settings["train"], "seq_len": 64}
    return validate(PretrainConfig, {**settings, "model": model, "train": train}, "test")


def _resident(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{field}:"))


def _return_freed_memory() -> None:
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)
    libc.mallopt(M_TRIM_THRESHOLD, 1 << 16)


def _forget_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
