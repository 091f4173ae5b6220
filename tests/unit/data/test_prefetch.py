"""Prefetching gives the same batches with any workers and restarts; no worker outlives its training."""

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hand_made import hand_made

from tost_lm.data import prefetch
from tost_lm.data.loader import BatchShard, Corpora, TrainingBatches
from tost_lm.data.prefetch import prefetched
from tost_lm.data.stages import Packing
from tost_lm.errors import DataError

CPU = torch.device("cpu")
LENGTHS = [1 + 37 * i % 49 for i in range(60)]


def batches_of(folder: Path, packing: Packing = "best-fit") -> TrainingBatches:
    return TrainingBatches(
        Corpora([hand_made(folder / "a", LENGTHS), hand_made(folder / "b", LENGTHS[7:])], [2, 1]),
        BatchShard(0, 1, ((0, 40 if packing == "best-fit" else 20),)),
        packing=packing, seed=1, global_batch_size=8, micro_batch_size=2, seq_len=20, ignored_label=-100,
    )  # fmt: skip


def read(batches: TrainingBatches, steps: range, workers: int) -> list[tuple[int, Any]]:
    """The micro-batches of each step, as lists."""
    with prefetched(batches, steps, workers, CPU) as found:
        return [(step, [[x if x is None else x.tolist() for x in micro] for micro in micros]) for step, micros in found]


@pytest.mark.quick
@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize("packing", ["concatenated", "best-fit"])
def test_batches_do_not_depend_on_workers_and_restarts(tmp_path: Path, packing: Packing):
    batches = batches_of(tmp_path, packing)
    expected = read(batches, range(23), 0)
    for workers in (1, 2, 3):
        assert read(batches, range(23), workers) == expected
    resumed = [read(batches, steps, 1) for steps in (range(5), range(5, 7), range(7, 18), range(18, 23))]
    assert [step for steps in resumed for step in steps] == expected
    assert all(expected[step][1] != expected[step + 1][1] for step in range(5))


def test_a_worker_that_dies_while_it_sends_a_batch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Cut:
        """An iterator whose worker is gone in the middle of a message."""

        def __init__(self) -> None:
            worker = multiprocessing.get_context("fork").Process(target=os._exit, args=(1,))
            worker.start()
            self._workers = [worker]

        def __next__(self) -> None:
            raise ConnectionResetError(104, "Connection reset by peer")

        def _shutdown_workers(self) -> None: ...

    monkeypatch.setattr(prefetch, "_start_iterator", lambda loader: Cut())
    with pytest.raises(DataError, match=r"data\.workers: DataLoader worker \(pid \d+\) exited unexpectedly, on "):
        read(batches_of(tmp_path), range(3), 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_pinning_thread_that_dies_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """torch's own thread, which dies where it chooses its device, because there is none."""
    if torch.accelerator.is_available():
        pytest.skip("for CPUs")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    expected = rf"data\.workers: Pin memory thread exited unexpectedly, on {socket.gethostname()}; run the same command"
    with (
        pytest.raises(DataError, match=expected),
        prefetched(batches_of(tmp_path), range(3), 1, torch.device("cuda")) as steps,
    ):
        next(steps)
    assert workers() == []


def test_prefetching_does_not_change_the_random_state(tmp_path: Path):
    before = torch.get_rng_state()
    read(batches_of(tmp_path), range(3), 1)
    assert torch.equal(torch.get_rng_state(), before)


def workers() -> list[int]:
    return [process.pid for process in multiprocessing.active_children() if process.pid]


@pytest.mark.parametrize("error", [None, KeyError("a defect of training"), RuntimeError("shapes do not fit")])
def test_workers_end_with_training_and_its_errors_pass_through(tmp_path: Path, error: Exception | None):
    def train() -> None:
        with prefetched(batches_of(tmp_path), range(1000), 2, CPU) as steps:
            next(steps)
            assert len(workers()) == 2
            if error:
                raise error

    if error:
        with pytest.raises(type(error)) as raised:
            train()
        assert raised.value is error
    else:
        train()
    assert workers() == []


def test_a_killed_worker_ends_training_in_one_line_that_names_it(tmp_path: Path):
    killed: list[int] = []
    finished_steps: list[int] = []

    def train() -> None:
        with prefetched(batches_of(tmp_path), range(10**6), 2, CPU) as steps:
            next(steps)
            killed.append(workers()[0])
            os.kill(killed[0], signal.SIGKILL)
            for _ in range(2000):
                time.sleep(0.01)  # a step that reads no batch
            finished_steps.append(1)

    with pytest.raises(DataError) as report:
        train()
    [pid] = killed
    assert not finished_steps
    assert workers() == []
    assert report.value.printed_here
    assert str(report.value) == (
        f"data.workers: DataLoader worker (pid {pid}) is killed by signal: Killed, on {socket.gethostname()}; run the "
        "same command to resume from the newest checkpoint, with data.workers=0 to use no workers"
    )


def send_from_elsewhere(signum: int, pid: int) -> None:
    subprocess.run([sys.executable, "-c", f"import os; os.kill({pid}, {int(signum)})"], check=True)


def test_workers_ignore_signals_to_the_process_group(tmp_path: Path):
    with prefetched(batches_of(tmp_path), range(30), 1, CPU) as steps:
        first = next(steps)
        for signum in (signal.SIGINT, signal.SIGTERM):
            send_from_elsewhere(signum, workers()[0])
        time.sleep(0.2)
        assert len([first, *steps]) == 30
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_a_worker_ends_when_its_rank_terminates_it(tmp_path: Path):
    with prefetched(batches_of(tmp_path), range(10**6), 1, CPU) as steps:
        next(steps)
        (worker,) = multiprocessing.active_children()
        worker.terminate()  # as Python does when it exits; then it waits forever
        worker.join(2)
        assert worker.exitcode == 0


def test_the_first_ctrl_c_is_deferred(tmp_path: Path):
    done = []

    def interrupted(times: int) -> None:
        with prefetch._signals_deferred():
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
                done.append(times)

    for times, reached in ((1, [1]), (2, [1, 2])):
        with pytest.raises(KeyboardInterrupt):
            interrupted(times)
        assert done == reached
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


PROGRAM = """
import multiprocessing, sys, time
from pathlib import Path
from typing import Any
sys.path.insert(0, {tests!r})
from test_prefetch import batches_of, prefetched, CPU
with prefetched(batches_of(Path({folder!r})), range(10**6), 2, CPU) as steps:
    next(steps)
    print(*[process.pid for process in multiprocessing.active_children()], flush=True)
    {then}
"""


def start(folder: Path, then: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A process with two workers, in its own process group."""
    program = PROGRAM.format(tests=str(Path(__file__).parent), folder=str(folder), then=then)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2, process.communicate()
    return process, pids


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while any(p.pid in pids and p.info["status"] != psutil.STATUS_ZOMBIE for p in psutil.process_iter(["status"])):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere workers check for their parent every 5 s")
def test_workers_end_when_their_rank_is_killed(tmp_path: Path):
    process, pids = start(tmp_path, "time.sleep(60)")
    process.kill()
    wait_until_gone(pids)
    process.communicate()


def test_only_the_rank_reports_ctrl_c(tmp_path: Path):
    process, pids = start(tmp_path, "[None for _ in steps]")
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    wait_until_gone(pids)
    assert re.findall(r"^\w*(?:Error|Interrupt)\b.*", errors, re.MULTILINE) == ["KeyboardInterrupt"], errors
