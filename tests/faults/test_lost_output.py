"""Training whose stdout and stderr are closed (`tost train … | head`) or full goes on, and loses nothing."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launches import launch
from test_stopped_runs import saved_steps

RecordFault = Callable[[str, int, str], None]


def closed(rank: int) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    redirect_to(writer)


def full(rank: int) -> None:
    redirect_to(os.open("/dev/full", os.O_WRONLY))


def redirect_to(file: int) -> None:
    sys.stdout.flush()  # what the server of the ranks has printed
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(file, number)
        setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115


@pytest.mark.parametrize("fault", [closed, pytest.param(full, marks=pytest.mark.slow)])
def test_training_goes_on_without_output(workplace: Path, fault: Callable[[int], None], record_fault: RecordFault):
    with launch(workplace, 1, "train.steps=20", inject=fault) as running:
        assert running.wait() == [0]
    assert sorted(saved_steps(workplace / "runs/tiny")) == [10, 20]
    log = (workplace / "runs/tiny/log.txt").read_text()
    assert "step 20/20  loss " in log
    assert "done: runs/tiny/checkpoints/step_00000020" in log
    with launch(workplace, 2, "train.steps=100000", "run.name=long", inject=fault) as running:
        running.until(lambda: running.step() > 3)
        running.send(signal.SIGINT)
        assert running.wait() == [75, 75]
        assert running.step() in saved_steps(workplace / "runs/long")
    record_fault(f"stdout and stderr are {fault.__name__}", 2, "training goes on; log.txt has the lines")
