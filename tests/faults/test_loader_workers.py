"""Loader workers without shared memory, or without an answer: the run ends with the reason, or can be stopped."""

import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from launches import Launch, launch, train
from test_lost_processes import worker_of
from test_stopped_runs import curve, saved_steps

from tost_lm.config import load_config
from tost_lm.data.loader import Batch, TrainingBatches
from tost_lm.pretrain.commands import preflight
from tost_lm.pretrain.settings import PretrainConfig

RecordFault = Callable[[str, int, str], None]
CLONE_NEWNS = 0x20000
LARGE = ("data.workers=1", "train.micro_batch_size=4096", "train.global_batch_size=4096", "train.steps=3")  # 1 MB
ENDLESS = ("data.workers=1", "train.steps=100000")


def can_mount() -> bool:
    return (
        subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True).returncode
        == 0
    )


def small_shared_memory(kilobytes: int, rank: int) -> None:
    """For this process and those that it starts."""
    assert ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", "/dev/shm"], check=True)


@pytest.mark.slow
def test_too_little_shared_memory_ends_the_run_with_the_reason(workplace: Path, record_fault: RecordFault):
    if not can_mount():
        pytest.skip("no permission to mount a tmpfs over /dev/shm")
    for ranks in (1, 2):
        micro_batch = f"train.micro_batch_size={4096 // ranks}"
        with launch(workplace, ranks, *LARGE, micro_batch, inject=partial(small_shared_memory, 300)) as running:
            assert set(running.wait()) == {2}, running.output()
            assert re.search(
                r"data\.workers: DataLoader worker \(pid.* exited unexpectedly.*: unable to \w+ (to|shared memory).*"
                r"No space left on device \(28\).*enlarge /dev/shm; in a container with --shm-size.*data\.workers=0",
                running.errors()[0],
            ), running.output()
    train(workplace, 1, *LARGE)
    record_fault("too little shared memory for loader workers", 2, "one line with the reason, exit code 2")


def test_preflight_compares_shared_memory_with_the_batches(workplace: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(workplace)
    monkeypatch.setattr("tost_lm.parallel.preflight.SHARED_MEMORY", workplace / "small")
    (workplace / "small").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3100k", "tmpfs", str(workplace / "small")]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no permission to mount a tmpfs")
    try:
        # 4096 sequences of 32 tokens and labels in 4 bytes; a worker reads two ahead, and one batch is in use.
        needed = 4096 * 32 * 2 * 4 * 3
        with pytest.raises(
            Exception, match=rf"small: 3\.2 MB free, but loader workers need {needed * 5 / 3 / 1e6:.1f} MB"
        ):
            preflight.main(Path("run.toml"), load_config(PretrainConfig, Path("run.toml"), [*LARGE, "data.workers=2"]))
        preflight.main(Path("run.toml"), load_config(PretrainConfig, Path("run.toml"), LARGE))
    finally:
        subprocess.run(["umount", "-l", str(workplace / "small")], check=True)


HUNG = 6


def hung_read(rank: int) -> None:
    """The read of step HUNG never returns, as on a file system that is lost."""
    read = TrainingBatches.__getitem__

    def read_or_hang(self: TrainingBatches, step: int) -> Batch:
        if rank == 0 and step == HUNG:
            time.sleep(1e6)
        return read(self, step)

    TrainingBatches.__getitem__ = read_or_hang


def is_waiting(running: Launch) -> bool:
    return running.step() == HUNG and running.heartbeat()["phase"] == "reading"


@pytest.mark.slow
def test_a_silent_worker_ends_a_run_of_one_rank_after_the_timeout(
    workplace: Path, record_fault: RecordFault, pace: Any
):
    started = time.monotonic()
    train(workplace, 1, "train.steps=1", "run.name=short")
    timeout_s = 3 + time.monotonic() - started  # much longer than a step
    with launch(workplace, 1, *ENDLESS, f"run.timeout_seconds={timeout_s}") as running:
        running.until(lambda: running.step() > 3 and worker_of(running, 0))
        worker = worker_of(running, 0)
        assert worker
        with pace() as machine:
            worker.suspend()
            since = time.monotonic()
            running.until(running.errors)
            took = time.monotonic() - since
        assert took < timeout_s + 2 * machine.slowest
        assert running.wait() == [2], running.output()
        (line,) = running.errors()
        name = rf"rank 0 \({os.uname().nodename}, pid {running.pids[0]}\)"
        assert re.match(rf"{name} hangs: reading of step {running.step()} for \d+ s", line), line
    record_fault("a silent loader worker, one rank", 1, "named after the heartbeat timeout")


@pytest.mark.parametrize("signum", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT])
def test_a_run_of_one_rank_that_waits_for_data_stops_gracefully(workplace: Path, signum: signal.Signals):
    with launch(workplace, 1, *ENDLESS, inject=hung_read) as running:
        running.until(lambda: is_waiting(running))
        running.send(signum)
        assert running.wait() == [75], running.output()
        assert saved_steps(workplace / "runs/tiny") == [HUNG]
        assert curve(workplace / "runs/tiny")[-1][0] == HUNG


@pytest.mark.slow
def test_a_second_ctrl_c_ends_ranks_that_wait_for_data(workplace: Path, record_fault: RecordFault):
    with launch(workplace, 2, *ENDLESS, inject=hung_read) as running:
        running.until(lambda: is_waiting(running))
        running.send(signal.SIGINT)
        running.until(lambda: "press Ctrl-C again" in running.output())
        time.sleep(1.5)
        running.send(signal.SIGINT)
        assert running.wait_for(0) == 130, running.output()
        assert running.wait_for(1) in (2, 130), running.output()  # it may notice that rank 0 is gone first
    outcome = "the first stops one rank gracefully; the second ends several at once"
    record_fault("Ctrl-C while waiting for data", 2, outcome)
