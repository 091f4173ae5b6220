"""Run a program in a process forked from a server that has imported torch, DeepSpeed and megatron-core.

A program is a command, for example `tost train`, or a module. It has its own folder, environment, signals and exit
code, and starts without the seconds that an interpreter and its imports take.
"""

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from tost_lm.testing.ranks import PRELOADED

CHECKOUT = Path(__file__).parents[2]
OWN = {"PYTHONPATH": str(CHECKOUT), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
ENVIRONMENT = {**os.environ, **OWN}
PRELOADED += ["pytest", "tost_lm.pretrain.train", "tost_lm.inference.likelihood"]
LIMIT_S = 280  # just below the timeout of a test


class Forked:
    """A started program; `finish` waits for its end."""

    def __init__(self, program: str, *words: object, cwd: Path, **environment: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tost_lm_program_")
        self._outputs = [str(Path(self._folder.name, name)) for name in ("stdout", "stderr")]
        arguments = (module_of(program, words), cwd, {**OWN, **environment}, self._outputs)
        self._process = _server().Process(target=_main, args=arguments)
        self._process.start()

    def output(self) -> str:
        """The text that it has written to stdout so far."""
        path = Path(self._outputs[0])
        return path.read_text() if path.exists() else ""

    def is_running(self) -> bool:
        return self._process.is_alive()

    def send_signal(self, signum: int) -> None:
        os.kill(self._process.pid, signum)

    def finish(self, limit_s: float = LIMIT_S) -> tuple[int, str, str]:
        """Exit code, stdout and stderr. A program that runs longer than `limit_s` is killed."""
        self._process.join(limit_s)
        self._process.kill()
        self._process.join()
        out, err = (Path(path).read_text() for path in self._outputs)
        self._folder.cleanup()
        return self._process.exitcode or 0, out, err


def wait_until(condition: Callable[[], object], *processes: subprocess.Popen[Any]) -> None:
    """Wait until `condition()` is true; an assertion fails after LIMIT_S, or if a process ends before."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert [process.poll() for process in processes] == [None] * len(processes)
        assert time.monotonic() < deadline
        time.sleep(0.02)


def module_of(program: str, words: Iterable[object]) -> list[str]:
    """The module that a program runs, then its words."""
    name, *command = program.split()
    return ["tost_lm.cli.main" if name == "tost" else name, *command, *map(str, words)]


def as_rank(rank: int, size: int, port: int, *, ranks_per_node: int) -> dict[str, str]:
    """The environment that torchrun gives to a rank, without the launcher's store."""
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": rank % ranks_per_node,
        "LOCAL_WORLD_SIZE": ranks_per_node,
        "GROUP_RANK": rank // ranks_per_node,
        "GROUP_WORLD_SIZE": size // ranks_per_node,
        "MASTER_PORT": port,
    }
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@cache
def _server() -> Any:
    os.environ["DS_ACCELERATOR"] = "cpu"  # the server passes it on to the programs
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _main(words: list[str], cwd: Path, environment: dict[str, str], outputs: list[str]) -> None:
    os.setsid()
    os.chdir(cwd)
    os.environ.update(environment)
    for stream, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    sys.argv = words
    sys.path.insert(0, str(CHECKOUT))
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
