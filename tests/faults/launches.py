"""`tost train` on ranks forked from a server with all imports done, so that many faults can be injected quickly.

A rank runs as under torchrun, without the launcher and its TCP store.
"""

import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from tost_lm.testing.ranks import PRELOADED

HANG_S = 240.0
PRELOADED.extend(["launches", "tost_lm.pretrain.commands.train", "tost_lm.pretrain.train", "tost_lm.data.loader"])


class Launch:
    """Running ranks; leaving the context kills them."""

    def __init__(self, ranks: Sequence[Any], folder: Path, name: str) -> None:
        self._ranks, self._folder = ranks, folder
        self.run_folder = folder / "runs" / name
        self.pids = [rank.pid for rank in ranks]

    def send(self, signum: signal.Signals, rank: int | None = None) -> None:
        """Send a signal to one rank or, like a launcher, to all that run."""
        for number, process in enumerate(self._ranks):
            if rank in (None, number) and process.is_alive():
                os.kill(process.pid, signum)

    def wait(self, seconds: float = HANG_S) -> list[int]:
        """The exit codes, negative for signals, of the ranks that end within `seconds`."""
        deadline = time.monotonic() + seconds
        for rank in self._ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
        return [rank.exitcode for rank in self._ranks if rank.exitcode is not None]

    def wait_for(self, rank: int, seconds: float = HANG_S) -> int | None:
        """The exit code of one rank, or None if it does not end within `seconds`."""
        self._ranks[rank].join(seconds)
        return self._ranks[rank].exitcode

    def until(self, condition: Callable[[], object]) -> None:
        """Wait until `condition()` is true."""
        deadline = time.monotonic() + HANG_S
        while not condition():
            assert any(rank.is_alive() for rank in self._ranks), f"the ranks ended too early:\n{self.output()}"
            assert time.monotonic() < deadline, f"the condition was not reached:\n{self.output()}"
            time.sleep(0.005)

    def output(self) -> str:
        """The output of all ranks so far, one rank after another."""
        return "".join(path.read_text(errors="replace") for path in sorted(self._folder.glob("rank_*.output")))

    def errors(self) -> list[str]:
        """The lines `error: …` of all ranks, without the prefix."""
        lines = self.output().splitlines()
        return [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]

    def heartbeat(self, rank: int = 0) -> dict[str, Any]:
        """The heartbeat of a rank; empty before the first one."""
        try:
            beat = json.loads((self.run_folder / "heartbeats" / f"rank_{rank:05d}.json").read_text())
        except (OSError, ValueError):
            return {}
        return beat if beat["pid"] == self.pids[rank] else {}

    def step(self, rank: int = 0) -> int:
        return int(self.heartbeat(rank).get("step", -1))


def no_fault(rank: int) -> None:
    """The default of `inject`."""


@contextmanager
def launch(
    folder: Path,
    ranks: int,
    *words: object,
    memory_bytes: int = 0,
    inject: Callable[[int], None] = no_fault,
) -> Iterator[Launch]:
    """`tost train run.toml WORDS` in `folder`.

    Args:
        memory_bytes: limit of what a rank adds to its address space; 0: no limit.
        inject: a picklable function; every rank calls it with its rank before anything else.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    for path in folder.glob("rank_*.output"):
        path.unlink()
    (folder / "store").unlink(missing_ok=True)
    everything = ["run.toml", *map(str, words)]
    name = next((word.split("=")[1] for word in reversed(everything) if word.startswith("run.name=")), "tiny")
    processes = [
        context.Process(target=_rank_main, args=(folder, rank, ranks, everything, memory_bytes, inject))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        yield Launch(processes, folder, name)
    finally:
        for process in processes:
            process.kill()
            process.join()


def train(folder: Path, ranks: int, *words: object) -> str:
    """Launch a run that must end well; its output."""
    with launch(folder, ranks, *words) as running:
        codes = running.wait()
        assert codes == [0] * ranks, running.output()
        return running.output()


def _rank_main(
    folder: Path,
    rank: int,
    ranks: int,
    words: list[str],
    memory_bytes: int,
    inject: Callable[[int], None],
) -> None:
    os.chdir(folder)
    out = os.open(f"rank_{rank:05d}.output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(out, stream)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    import torch
    import torch.distributed as dist

    from tost_lm.config import load_config
    from tost_lm.parallel import timeouts
    from tost_lm.pretrain.commands.train import run
    from tost_lm.pretrain.settings import PretrainConfig

    timeouts.WRITE_S = 0.0  # tests wait for phases that are much shorter than a second
    torch.set_num_threads(1)
    inject(rank)
    if memory_bytes:
        used = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (used + memory_bytes, used + memory_bytes))
    timeout = load_config(PretrainConfig, Path(words[0]), words[1:]).run.timeout_seconds
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout)
    )
    dist.barrier()  # gloo fails if a rank ends while another one still connects
    try:
        sys.argv[1:] = words
        run()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
