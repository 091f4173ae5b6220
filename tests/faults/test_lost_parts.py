"""A rank that hangs, a loader worker that dies, memory that is not there: one line each, and nothing is lost."""

import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from launches import Launch, launch, train
from test_stopped_runs import curve

Times = Callable[[int], int]
Survived = Callable[[str, int, str], None]
TIMEOUT_S = 2.0
SLACK_S = 1.0  # to end a process and to notice it, on a machine that does other things


def test_a_stopped_rank_is_named_with_its_last_step(workplace: Path, times: Times, survived: Survived):
    draws, longest = random.Random(2), 0.0
    for _ in range(times(5)):
        with launch(workplace, 2, f"run.timeout_seconds={TIMEOUT_S}", "train.steps=100000") as running:
            started = max(running.step(), 0)
            at, hung = started + draws.randint(5, 30), draws.randrange(2)
            running.until(lambda: running.step() >= at)
            running.send(signal.SIGSTOP, hung)
            since = time.monotonic()
            assert running.wait_for(1 - hung) == 2, running.said()
            longest = max(longest, time.monotonic() - since)
            assert longest < TIMEOUT_S + 2 + SLACK_S
            (line,) = running.errors()
            last = running.step(hung)
            name = rf"rank {hung} \({os.uname().nodename}, pid {running.pids[hung]}\) was lost: it does not answer"
            assert re.match(rf"{name}; its last step was {last} \(\w+, \d+ s ago\)", line), line
    survived("hang (SIGSTOP)", times(5), f"named with its last step, at most {longest:.1f} s after (limit 2 s + 2 s)")


def worker_of(running: Launch, rank: int) -> psutil.Process | None:
    workers = [child for child in psutil.Process(running.pids[rank]).children() if child.status() != "zombie"]
    return workers[0] if workers else None


def test_a_killed_loader_worker_ends_the_run_within_a_second(
    workplace: Path, never_stopped: Path, times: Times, survived: Survived
):
    draws, slowest = random.Random(3), 0.0
    for _ in range(times(5)):
        with launch(workplace, 2, "data.workers=1", "train.steps=300") as running:
            lost, at = draws.randrange(2), draws.randint(3, 15)
            running.until(lambda: running.step() >= at and worker_of(running, lost))
            worker = worker_of(running, lost)
            assert worker
            worker.kill()
            since = time.monotonic()
            running.until(running.errors)
            slowest = max(slowest, time.monotonic() - since)
            assert slowest < 1 + SLACK_S
            assert running.wait(20) == [2, 2]
            assert re.search(rf"data\.workers: DataLoader worker \(pid\(?s?\)? {worker.pid}\)", running.errors()[0])
    train(workplace, 2, "data.workers=1")
    assert curve(workplace / "runs/tiny") == curve(never_stopped)
    survived("loader worker killed", times(5), f"an error line within {slowest:.1f} s; the order unchanged")


def test_out_of_memory_names_what_asked_for_it(workplace: Path, times: Times, survived: Survived):
    words = ("model.width=256", "train.micro_batch_sequences=4096", "train.batch_sequences=4096")
    for count in range(times(5)):
        room = (800 + 70 * (count % 5)) << 20  # enough to build the model, not for a step
        with launch(workplace, 1, *words, f"run.name=short{count}", memory_bytes=room) as running:
            assert running.wait() == [2], running.said()
            (line,) = running.errors()
            assert re.match(r"rank 0 \(.+\) is out of memory \(training, step 0\): ", line)
            assert re.search(
                r"of a micro-batch of 4096 × 32 tokens here [1-9]\.\d\d GB are kept for the backward", line
            )
            assert "lower train.micro_batch_sequences or memory.tile_tokens" in line
    survived("out of memory", times(5), "batch, T, what is kept of them and the options named")
