"""A rank that hangs, and too little memory: one error line each."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from launches import HANG_S, launch
from test_restarts import CHECKOUT

from tost_lm.parallel.watchdog import read_heartbeats

Times = Callable[[int], int]
RecordFault = Callable[[str, int, str], None]
TIMEOUT_S = 5.0


@pytest.mark.slow
def test_a_stopped_rank_is_named_with_its_last_step(
    workplace: Path, times: Times, record_fault: RecordFault, pace: Any
):
    draws, longest, records = random.Random(2), 0.0, 0
    count = max(3, times(5))
    for _ in range(count):
        with launch(workplace, 2, f"run.timeout_seconds={TIMEOUT_S}", "train.steps=100000") as running:
            started = max(running.step(), 0)
            at, hung = started + draws.randint(5, 30), draws.randrange(2)
            running.until(lambda: running.step() >= at)
            with pace() as machine:
                running.send(signal.SIGSTOP, hung)
                since = time.monotonic()
                running.until(running.errors)
                took = time.monotonic() - since
            longest = max(longest, took)
            assert took < TIMEOUT_S + 2 * machine.slowest
            assert running.wait_for(1 - hung) == 2, running.output()
            (line,) = running.errors()
            last = running.step(hung)
            name = rf"rank {hung} \({os.uname().nodename}, pid {running.pids[hung]}\) was lost: it does not answer"
            assert re.match(rf"{name}; its last step was {last} \(\w+, \d+ s ago\)", line), line
            records += (running.run_folder / f"flight_recorder/rank_{1 - hung}").exists()
    assert records  # a dump may take 1 s, which a slow machine may exceed twice
    limit = f"limit {TIMEOUT_S:.0f} s + 2 s"
    record_fault("hang (SIGSTOP)", count, f"named with its last step, after at most {longest:.1f} s ({limit})")


@pytest.mark.slow
def test_tost_train_ends_soon_after_a_stopped_rank_is_named(workplace: Path, pace: Any):
    words = ["launch.ranks=2", f"run.timeout_seconds={TIMEOUT_S}", "train.steps=100000"]
    words += ["validation.interval=1", "validation.sequences=400"]
    command = [sys.executable, "-m", "tost_lm.cli.main", "train", "run.toml", *words]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    with subprocess.Popen(
        command, cwd=workplace, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as launcher:
        try:
            deadline, beats = time.monotonic() + HANG_S, {}
            while 1 not in beats or beats[1].phase != "validation" or beats[1].step < 2:
                beats = read_heartbeats(workplace / "runs/tiny/heartbeats")
                assert launcher.poll() is None
                assert time.monotonic() < deadline
            with pace() as machine:
                os.kill(beats[1].pid, signal.SIGSTOP)
                since = time.monotonic()
                psutil.wait_procs([psutil.Process(beats[0].pid)], HANG_S)
                outlived = psutil.pid_exists(beats[1].pid) and psutil.Process(beats[1].pid).status() == "stopped"
                _, errors = launcher.communicate(timeout=HANG_S)
                took = time.monotonic() - since
        finally:
            launcher.kill()
    name = rf"rank 1 \(.*, pid {beats[1].pid}\) was lost: it does not answer"
    assert re.fullmatch(rf"error: {name}; its last step was \d+ \(\w+, \d+ s ago\)\n", errors)
    assert launcher.returncode == 2
    assert not outlived  # the launcher would wait for it for half a minute
    assert took < TIMEOUT_S + 10 * machine.slowest


def test_out_of_memory_names_the_settings_to_change(workplace: Path, times: Times, record_fault: RecordFault):
    words = ("model.width=256", "train.micro_batch_size=16384", "train.global_batch_size=16384")
    for count in range(times(5)):
        # Enough to build the model; the first activation alone has 512 MiB. With a few MiB left a thread of C++ fails
        # to start, which aborts or blocks the process.
        memory_bytes = (350 + 60 * (count % 5)) << 20
        with launch(workplace, 1, *words, f"run.name=short{count}", memory_bytes=memory_bytes) as running:
            assert running.wait() == [2], running.output()
            (line,) = running.errors()
            assert re.match(r"rank 0 \(.+\) is out of memory \(training, step 0\): ", line)
            assert re.search(
                r"the activations of 16384 × 32 tokens [1-9][\d.]+ GB; lower train\.micro_batch_size", line
            )
            assert "lower train.micro_batch_size or memory.tile_tokens" in line
    record_fault("out of memory", times(5), "the error names batch, sequence length, memory and the settings to change")
