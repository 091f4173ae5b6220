"""SIGTERM ends an evaluation, on one rank and on several, and the finished lengths remain."""

import signal
import time
from pathlib import Path

import pytest
from forked import Forked
from programs import run

STARTED_S, STOPPED_S = 120, 60
"""Generous limits, which only catch a hang."""
RECORDS = ["records", "records.depths=[0.5]", "records.samples=4"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_ends_an_evaluation_that_resumes(workplace: Path, ranks: int):
    run("tost train", "run.toml", "model.positions=none", "model.tssa.denom_bias=head", "train.steps=2", cwd=workplace)
    words = ["runs/tiny", *RECORDS, f"launch.ranks={ranks}"]
    stopped = Forked("tost eval", *words, "records.lengths=[640, 200000]", cwd=workplace)
    deadline, measured = time.monotonic() + STARTED_S, "records@numbers: 640 tokens"
    while stopped.is_running() and measured not in stopped.output() and time.monotonic() < deadline:
        time.sleep(0.05)
    stopped.send_signal(signal.SIGTERM)
    code, _, errors = stopped.finish(STOPPED_S)
    assert code in (143, -signal.SIGTERM), errors
    assert "Traceback" not in errors
    assert not (workplace / "runs/tiny/eval/records@numbers/results.json").exists()
    said = run("tost eval", *words, "records.lengths=[640, 700]", cwd=workplace)
    assert "records@numbers: reusing 1 of 2 lengths" in said
