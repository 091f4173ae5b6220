"""One of two ranks on the same device, for `benchmarks.gpu`: training steps of each parallel layout; then rank 1 is
killed. Without a launcher, the steps of one rank.

    python -m benchmarks.gpu_ranks CELLS BACKEND DEVICE

Rank 0 appends to the file CELLS a line of JSON once the ranks are connected, and one for each layout.
"""

import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure import append_cell, print_tracebacks
from tost_lm.config import validate
from tost_lm.data.prefetch import MicroBatch
from tost_lm.errors import TostError
from tost_lm.parallel.mesh import Mesh, World, build_mesh, max_over_ranks, prefer_loopback, start_world
from tost_lm.parallel.timeouts import Timeouts
from tost_lm.parallel.watchdog import Heartbeat, watch_ranks
from tost_lm.pretrain.batches import tiling_of
from tost_lm.pretrain.engine import build_training_engine
from tost_lm.pretrain.settings import PretrainConfig
from tost_lm.pretrain.step import train_step
from tost_lm.pretrain.tiled import Tiling

ONE_RANK: dict[str, dict[str, int]] = {"one rank": {}}
LAYOUTS = {
    "ZeRO 1": {"zero_stage": 1}, "ZeRO 2": {"zero_stage": 2}, "ZeRO 3": {"zero_stage": 3},
    "tensor 2": {"tensor": 2}, "sequence 2": {"sequence": 2},
}  # fmt: skip
MODEL = {"pattern": "TDA", "layers": 3, "heads": 4, "width": 256, "vocab_size": 512, "layer_scale": 1.0}
STEPS, ROWS, MICRO_BATCH, T = 3, 4, 2, 128
KILLED_AT = 3
TIMEOUTS = {"cuda": Timeouts(heartbeat=30.0), "cpu": Timeouts()}


def main(cells: str, backend: str, device: Any) -> None:
    print_tracebacks()
    if backend != {"cuda": "nccl", "cpu": "gloo"}[device]:  # start_world would choose the other one
        prefer_loopback()
        dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUTS[device].collective))
    world = start_world(device, TIMEOUTS[device])
    max_over_ranks(0)
    write = partial(append_cell, cells) if world.rank == 0 else lambda cell: None
    write({"connected": dist.get_backend()})
    for name, layout in (LAYOUTS if world.size > 1 else ONE_RANK).items():
        try:
            write({"case": name, "losses": losses(world, layout)})
        except Exception as error:  # the other layouts are still worth having
            traceback.print_exc()
            write({"case": name, "failed": traceback.format_exception_only(error)[-1].splitlines()[0]})
        gc.collect()
    if world.size > 1:
        lose_rank_1(world, Path(cells).parent)


def losses(world: World, layout: dict[str, int]) -> list[float]:
    """The losses of a few steps on the same rows, whatever the layout."""
    step = training_step(world, layout)
    return [step(number) for number in range(STEPS)]


def training_step(world: World, layout: dict[str, int]) -> Callable[[int], float]:
    """A function that trains step `number` with the engine of `tost train`, and returns the loss."""
    tree = {
        "model": {**MODEL, "max_positions": T, "softmax": {"window": 40}},
        "data": {"folder": "unused"},
        "optim": {"lr": 1e-3, "warmup_steps": 1},
        "train": {
            "steps": STEPS, "global_batch_size": ROWS, "micro_batch_size": MICRO_BATCH, "seq_len": T,
            "dtype": "bfloat16",
        },
        "parallel": layout,
        "run": {"name": "unused"},
    }  # fmt: skip
    config = validate(PretrainConfig, tree, "benchmarks.gpu")
    mesh = build_mesh(world, config.parallel)
    engine, tiling = build_training_engine(config, mesh), tiling_of(config, mesh)
    engine.draw_weights()
    return lambda number: train_step(engine, micro_batches(mesh, tiling, number), tiling, config.optim.lr).loss


def micro_batches(mesh: Mesh, tiling: Tiling, step: int) -> list[MicroBatch]:
    """Those of this rank: its rows, and of these the columns of its sequence shard."""
    windows = torch.randint(MODEL["vocab_size"], (ROWS, T + 1), generator=torch.Generator().manual_seed(step))
    windows, (start, end) = windows.chunk(mesh.data.size)[mesh.data.rank].to(mesh.device), tiling.tiles[0].columns
    rows = [x[:, start:end].split(MICRO_BATCH) for x in (windows[:, :-1], windows[:, 1:])]
    return [MicroBatch(*x) for x in zip(*rows, strict=True)]


def lose_rank_1(world: World, folder: Path) -> None:
    """Train until rank 1 is killed; the watchdog then ends rank 0 with an error that names it."""
    heartbeat = Heartbeat(folder / "heartbeats", world.rank)
    with watch_ranks(heartbeat, TIMEOUTS[world.device.type]):
        step = training_step(world, LAYOUTS["ZeRO 1"])
        for number in count():
            heartbeat.record(number, "training")
            if world.rank == 1 and number == KILLED_AT:
                os.kill(os.getpid(), signal.SIGKILL)
            step(number)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except TostError as error:
        if error.printed_here is not False:
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
