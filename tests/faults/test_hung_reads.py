"""The read of a batch does not return: the run ends with the reason, or can be stopped. Slow tiles are no hang."""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launches import Launch, launch, train
from test_stopped_runs import curve, saved_steps

from tost_lm.data.loader import Batch, TrainingBatches
from tost_lm.pretrain.tiled import TiledLM

RecordFault = Callable[[str, int, str], None]
ENDLESS = ("data.workers=1", "train.steps=100000")
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
def test_a_run_of_one_rank_whose_read_hangs_ends_after_the_timeout(
    workplace: Path, record_fault: RecordFault, pace: Any
):
    started = time.monotonic()
    train(workplace, 1, "train.steps=1", "run.name=short")
    timeout_s = 3 + time.monotonic() - started  # much longer than a step
    with launch(workplace, 1, *ENDLESS, f"run.timeout_seconds={timeout_s}", inject=hung_read) as running:
        running.until(lambda: is_waiting(running))
        with pace() as machine:
            since = time.monotonic()
            running.until(running.errors)
            took = time.monotonic() - since
        assert took < timeout_s + 2 * machine.slowest
        assert running.wait() == [2], running.output()
        (line,) = running.errors()
        name = rf"rank 0 \({os.uname().nodename}, pid {running.pids[0]}\)"
        assert re.match(rf"{name} hangs: reading of step {HUNG} for \d+ s", line), line
    record_fault("a read that hangs, one rank", 1, "named after the heartbeat timeout")


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


def slow_tiles(rank: int) -> None:
    forward = TiledLM.forward
    TiledLM.forward = lambda *arguments, **options: time.sleep(1.0) or forward(*arguments, **options)


def test_a_step_longer_than_the_timeout_is_no_hang_while_its_tiles_advance(workplace: Path):
    """Seven forwards: two micro-batches of two tiles, of which one is computed twice, and a validation."""
    words = ("train.steps=1", "memory.tile_tokens=16", "run.timeout_seconds=4", "run.name=slow")
    with launch(workplace, 1, *words, inject=slow_tiles) as running:
        assert running.wait() == [0], running.output()
