"""`launch.ranks`: a program starts its ranks itself, forwards signals to them and exits with their code."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from forked import ENVIRONMENT, LIMIT_S

LONG = ["train.steps=100000", "checkpoint.interval=100000", "launch.ranks=2"]


@contextmanager
def launched(*words: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tost_lm.cli.main", *words]
    with subprocess.Popen(
        command, cwd=cwd, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            for rank in psutil.Process(process.pid).children() if process.poll() is None else []:
                rank.kill()
            process.kill()


def wait_for_a_step(process: subprocess.Popen[str], folder: Path) -> None:
    rows, deadline = folder / "runs/tiny/metrics.jsonl", time.monotonic() + LIMIT_S
    while not (rows.exists() and rows.stat().st_size) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.05)


def test_sigterm_saves_on_all_ranks_and_exits_with_75(workplace: Path):
    with launched("train", "run.toml", *LONG, cwd=workplace) as process:
        wait_for_a_step(process, workplace)
        process.terminate()
        _, errors = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, errors) == (75, "")
    assert "stopped on SIGTERM with everything saved" in (workplace / "runs/tiny/log.txt").read_text()


def test_a_killed_rank_ends_the_launch_with_one_line(workplace: Path):
    with launched("train", "run.toml", *LONG, cwd=workplace) as process:
        wait_for_a_step(process, workplace)
        (rank,) = [rank for rank in psutil.Process(process.pid).children() if rank.environ()["RANK"] == "1"]
        os.kill(rank.pid, signal.SIGKILL)
        _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2
    assert re.fullmatch(rf"error: rank 1 \(.*, pid {rank.pid}\) was lost: .*\n", errors)


@pytest.mark.parametrize(
    "words",
    [
        ["train", "run.toml", "launch.ranks=2", "data.folder=nowhere"],
        ["eval", "text", "nowhere", "text.file=run.toml", "parallel.sequence=2"],
    ],
)
def test_an_error_of_all_ranks_is_printed_once(workplace: Path, words: list[str]):
    with launched(*words, cwd=workplace) as process:
        _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2
    assert re.fullmatch(r"error: nowhere.*\n", errors)
