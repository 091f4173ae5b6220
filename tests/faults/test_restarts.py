"""Twenty killed ranks in one launch: torchrun restarts the ranks each time, and they finish the run."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest
from launches import train
from test_stopped_runs import curve

from tost_lm.parallel.watchdog import read_heartbeats

CHECKOUT = Path(__file__).parents[2]
PROGRAM = """
from tost_lm.parallel import timeouts
from tost_lm.pretrain.commands.train import run

timeouts.WRITE_S = 0.0  # the test waits for steps
run()
"""
KILLS = int(os.environ.get("KILLS", "20"))


def launch(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", f"--max-restarts={KILLS}"]
    torchrun += ["--no-python", sys.executable, "-c", PROGRAM]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    with (folder / "stderr").open("wb") as file:
        return subprocess.Popen(
            [sys.executable, *torchrun, "run.toml", *words],
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=file,
        )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_torchrun_finishes_a_run_with_twenty_killed_ranks(
    workplace: Path, record_fault: Callable[[str, int, str], None]
):
    train(workplace, 2, "run.name=uninterrupted", "train.steps=600")
    launcher, killed, at = launch(workplace, "train.steps=600", "run.timeout_seconds=20"), list[int](), 20
    first_steps, ended, killed_at, lost_s = dict[int, int](), set[int](), 0.0, list[float]()
    while len(lost_s) < KILLS and launcher.poll() is None:
        time.sleep(0.01)
        for beat in read_heartbeats(workplace / "runs/tiny/heartbeats").values():
            is_trained = beat.step > first_steps.setdefault(beat.pid, beat.step) and beat.pid not in ended
            if is_trained and len(lost_s) < len(killed):
                lost_s.append(time.monotonic() - killed_at)
            if is_trained and len(killed) == len(lost_s) < KILLS and beat.step >= at and beat.rank == len(killed) % 2:
                os.kill(beat.pid, signal.SIGKILL)
                ended, killed_at, at = set(first_steps), time.monotonic(), beat.step + 20
                killed.append(beat.pid)
    code, errors = launcher.wait(), (workplace / "stderr").read_text()
    assert code == 0, errors
    lost = [int(pid) for pid in re.findall(r"^error: rank \d \(.*, pid (\d+)\) was lost", errors, re.MULTILINE)]
    assert lost == killed
    assert len(killed) == KILLS
    assert curve(workplace / "runs/tiny") == curve(workplace / "runs/uninterrupted")
    took = f"the next step was trained {median(lost_s):.0f} s (at most {max(lost_s):.0f} s) after the kill"
    record_fault("a rank killed under torchrun --max-restarts", KILLS, f"the error names it; {took}; bit-exact")
