"""Prefetching gives the same batches with any threads and restarts; no thread outlives its training."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_made import LENGTHS, batches_of, hand_made

from tost_lm.data.loader import Batch, Corpora, TrainingBatches
from tost_lm.data.prefetch import READ_AHEAD, prefetched
from tost_lm.data.stages import Packing
from tost_lm.errors import DataError

CPU = torch.device("cpu")


def batches_in(folder: Path, packing: Packing = "best-fit") -> TrainingBatches:
    corpora = Corpora([hand_made(folder / "a", LENGTHS), hand_made(folder / "b", LENGTHS[7:])], [2, 1])
    return batches_of(corpora, packing)


def read(batches: TrainingBatches, steps: range, workers: int) -> list[tuple[int, Any]]:
    """The micro-batches of each step, as lists."""
    with prefetched(batches, steps, workers, CPU) as found:
        return [(step, [[x if x is None else x.tolist() for x in micro] for micro in micros]) for step, micros in found]


@pytest.mark.quick
@pytest.mark.parametrize("packing", ["concatenated", "best-fit"])
def test_batches_do_not_depend_on_workers_and_restarts(tmp_path: Path, packing: Packing):
    batches = batches_in(tmp_path, packing)
    expected = read(batches, range(23), 0)
    for workers in (1, 2, 3):
        assert read(batches, range(23), workers) == expected
    resumed = [read(batches, steps, 1) for steps in (range(5), range(5, 7), range(7, 18), range(18, 23))]
    assert [step for steps in resumed for step in steps] == expected
    assert all(expected[step][1] != expected[step + 1][1] for step in range(5))


class ReadBy:
    """Batches of which a test sees or changes the reads."""

    def __init__(self, batches: TrainingBatches, before: Callable[[int], object]) -> None:
        self._batches, self._before = batches, before

    def __getitem__(self, step: int) -> Batch:
        self._before(step)
        return self._batches[step]


def batches_with(folder: Path, before: Callable[[int], object]) -> Any:
    """`before` is called with the step before each read."""
    return ReadBy(batches_in(folder), before)


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("reader")]


def test_a_bounded_number_of_batches_is_read_ahead(tmp_path: Path):
    read_steps: list[int] = []
    with prefetched(batches_with(tmp_path, read_steps.append), range(10**6), 2, CPU) as steps:
        next(steps)
        deadline = time.monotonic() + 60
        while len(read_steps) < 1 + 2 * READ_AHEAD:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(0.1)
        assert sorted(read_steps) == [*range(1 + 2 * READ_AHEAD)]


@pytest.mark.parametrize("error", [DataError("a shard: damaged"), TimeoutError(110, "timed out"), SystemExit(3)])
def test_an_error_of_a_thread_is_raised_at_its_step(tmp_path: Path, error: BaseException):
    def fail(step: int) -> None:
        if step == 4:
            raise error

    reached: list[int] = []
    with pytest.raises(type(error)) as raised, prefetched(batches_with(tmp_path, fail), range(9), 2, CPU) as steps:
        reached.extend(step for step, _ in steps)
    assert raised.value is error
    assert reached == [0, 1, 2, 3]
    assert not readers()


@pytest.mark.parametrize("error", [None, KeyError("a defect of training"), RuntimeError("shapes do not fit")])
def test_threads_end_with_training_and_its_errors_pass_through(tmp_path: Path, error: Exception | None):
    def train() -> None:
        with prefetched(batches_in(tmp_path), range(1000), 2, CPU) as steps:
            next(steps)
            assert len(readers()) == 2
            if error:
                raise error

    if error:
        with pytest.raises(type(error)) as raised:
            train()
        assert raised.value is error
    else:
        train()
    assert not readers()


PROGRAM = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_prefetch import batches_with, prefetched, CPU
def hang(step):
    if step == 3:
        print("hangs", flush=True)
        time.sleep(1e6)
with prefetched(batches_with(Path({folder!r}), hang), range(10**6), 2, CPU) as steps:
    [None for _ in steps]
"""


def test_ctrl_c_ends_a_process_whose_read_hangs(tmp_path: Path):
    program = PROGRAM.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "hangs\n", process.communicate()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert errors.count("Traceback") == 1
    assert errors.endswith("KeyboardInterrupt\n")
