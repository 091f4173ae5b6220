"""Twenty killed ranks in one launch: torchrun restarts the ranks each time, and they finish the run."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launches import train
from test_stopped_runs import curve

from tost_lm.parallel.watchdog.heartbeat import read_heartbeats

CHECKOUT = Path(__file__).parents[2]
KILLS = 20


def launch(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", f"--max-restarts={KILLS}"]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    with (folder / "stderr").open("wb") as file:
        return subprocess.Popen(
            [sys.executable, *torchrun, "-m", "pretrain.train", "run.toml", *words],
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=file,
        )


@pytest.mark.timeout(1800)
def test_torchrun_finishes_a_run_with_twenty_killed_ranks(
    workplace: Path, request: pytest.FixtureRequest, record_fault: Callable[[str, int, str], None]
):
    if not request.config.getoption("--full"):
        pytest.skip("takes minutes; use make test-full")
    train(workplace, 2, "run.name=uninterrupted", "train.steps=600")
    launcher, killed, at = launch(workplace, "train.steps=600", "run.timeout_seconds=20"), [], 20
    while len(killed) < KILLS and launcher.poll() is None:
        time.sleep(0.01)
        beat = read_heartbeats(workplace / "runs/tiny/heartbeats").get(len(killed) % 2)
        if beat and beat.phase == "training" and beat.step >= at and beat.pid not in killed:
            os.kill(beat.pid, signal.SIGKILL)
            killed.append(beat.pid)
            at = beat.step + 20
    code, errors = launcher.wait(), (workplace / "stderr").read_text()
    assert code == 0, errors
    lost = [int(pid) for pid in re.findall(r"^error: rank \d \(.*, pid (\d+)\) was lost", errors, re.MULTILINE)]
    assert lost == killed
    assert len(killed) == KILLS
    assert curve(workplace / "runs/tiny") == curve(workplace / "runs/uninterrupted")
    record_fault("a rank killed under torchrun --max-restarts", KILLS, "the error names it; restarted; bit-exact")
