"""Twenty deaths in one launch: torchrun starts the ranks again each time, and they carry the run through."""

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

from tost_lm.parallel.heartbeat import read_heartbeats

CHECKOUT = Path(__file__).parents[2]
KILLS = 20


def launch(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", f"--max-restarts={KILLS}"]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    with (folder / "stderr").open("wb") as file:
        return subprocess.Popen(
            [sys.executable, *torchrun, "-m", "pretrain.train", "run.toml", *words],
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=file,
        )


@pytest.mark.timeout(1800)
def test_torchrun_carries_a_run_through_twenty_deaths(
    workplace: Path, request: pytest.FixtureRequest, survived: Callable[[str, int, str], None]
):
    if not request.config.getoption("--full"):
        pytest.skip("takes minutes; three deaths in one launch are in tests/programs/test_lost_rank.py")
    train(workplace, 2, "run.name=never_stopped", "train.steps=600")
    launcher, killed, at = launch(workplace, "train.steps=600", "run.timeout_seconds=20"), [], 20
    while len(killed) < KILLS and launcher.poll() is None:
        time.sleep(0.01)
        beat = read_heartbeats(workplace / "runs/tiny/heartbeats").get(len(killed) % 2)
        if beat and beat.phase == "training" and beat.step >= at and beat.pid not in killed:
            os.kill(beat.pid, signal.SIGKILL)
            killed.append(beat.pid)
            at = beat.step + 20
    said = lambda: (workplace / "stderr").read_text()
    assert launcher.wait() == 0, said()
    lost = [int(pid) for pid in re.findall(r"^error: rank \d \(.*, pid (\d+)\) was lost", said(), re.MULTILINE)]
    assert lost == killed
    assert len(killed) == KILLS
    assert curve(workplace / "runs/tiny") == curve(workplace / "runs/never_stopped")
    survived("rank killed under torchrun --max-restarts", KILLS, "named, started again, bit-exact")
