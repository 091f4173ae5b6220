"""One launch per run folder."""

import multiprocessing
import os
import re
import signal
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tost_lm.errors import ConfigError
from tost_lm.training.lock import run_lock


def hold(folder: Path, pipe: Connection, forks: bool) -> None:
    with run_lock(folder, 0):
        if forks:  # as loader workers are
            child = multiprocessing.get_context("fork").Process(target=signal.pause)
            child.start()
            pipe.send(child.pid)
        pipe.send("held")
        signal.pause()


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return tmp_path / "runs/mine"


@pytest.fixture
def holder(run_folder: Path) -> Iterator[tuple[BaseProcess, int]]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=hold, args=(run_folder, theirs, True))
    process.start()
    child = ours.recv()
    assert ours.recv() == "held"
    yield process, child
    process.kill()
    process.join()
    os.kill(child, signal.SIGKILL)


def test_a_second_launch_is_refused_naming_host_and_pid(run_folder: Path, holder):
    process, _ = holder
    for _ in range(5):
        line = rf"runs/mine: another launch is using it \(host {socket.gethostname()}, pid {process.pid}\)"
        with pytest.raises(ConfigError, match=line), run_lock(run_folder, 0):
            pass
    with run_lock(run_folder, 1), run_lock(run_folder.with_name("other"), 0):
        pass


def test_a_killed_launch_leaves_no_obstacle_though_its_workers_live(run_folder: Path, holder):
    process, child = holder
    process.kill()
    process.join()
    os.kill(child, 0)
    for _ in range(2):
        with run_lock(run_folder, 0):
            assert re.search(rf"pid {os.getpid()}$", (run_folder.parent / ".mine.lock").read_text())
