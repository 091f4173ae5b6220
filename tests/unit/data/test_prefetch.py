"""Batches made ahead: the same whoever makes them and after any restart, and no worker outlives its training."""

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hand_made import hand_made

from tost_lm.data import prefetch
from tost_lm.data.loader import Packing, Share, TrainingBatches
from tost_lm.data.mixture import Corpora
from tost_lm.data.prefetch import MicroBatch, prefetched
from tost_lm.errors import DataError

CPU = torch.device("cpu")
LENGTHS = [1 + 37 * i % 49 for i in range(60)]


def batches_of(folder: Path, packing: Packing = "best-fit") -> TrainingBatches:
    return TrainingBatches(
        Corpora([hand_made(folder / "a", LENGTHS), hand_made(folder / "b", LENGTHS[7:])], [2, 1]),
        Share(0, 1, ((0, 40 if packing == "best-fit" else 20),)),
        packing=packing, seed=1, batch_sequences=8, micro_batch_sequences=2, sequence_tokens=20, ignored_label=-100,
    )  # fmt: skip


def read(batches: TrainingBatches, steps: range, workers: int) -> list[tuple[int, list[MicroBatch]]]:
    with prefetched(batches, steps, workers, CPU) as found:
        return list(found)


def same(one: list[tuple[int, list[MicroBatch]]], other: list[tuple[int, list[MicroBatch]]]) -> bool:
    assert [step for step, _ in one] == [step for step, _ in other]
    pairs = [
        (x, y)
        for (_, ones), (_, others) in zip(one, other, strict=True)
        for a, b in zip(ones, others, strict=True)
        for x, y in zip(a, b, strict=True)
    ]
    return all((x is y) if x is None or y is None else torch.equal(x, y) for x, y in pairs)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize("packing", ["concatenated", "best-fit"])
def test_workers_and_restarts_change_nothing(tmp_path: Path, packing: Packing):
    batches = batches_of(tmp_path, packing)
    expected = read(batches, range(23), 0)
    for workers in (1, 2, 3):
        assert same(read(batches, range(23), workers), expected)
    begun_again = [read(batches, steps, 1) for steps in (range(5), range(5, 7), range(7, 18), range(18, 23))]
    assert same([step for part in begun_again for step in part], expected)
    assert not same(read(batches, range(5), 0), [(step, expected[step + 1][1]) for step in range(5)])


def test_what_training_draws_is_not_touched(tmp_path: Path):
    before = torch.get_rng_state()
    read(batches_of(tmp_path), range(3), 1)
    assert torch.equal(torch.get_rng_state(), before)


def workers() -> list[int]:
    return [process.pid for process in multiprocessing.active_children() if process.pid]


@pytest.mark.parametrize("how_it_ends", [None, KeyError("a defect of training"), RuntimeError("shapes do not fit")])
def test_workers_are_gone_when_training_ends_and_its_errors_go_on_unchanged(
    tmp_path: Path, how_it_ends: Exception | None
):
    def train() -> None:
        with prefetched(batches_of(tmp_path), range(1000), 2, CPU) as steps:
            next(steps)
            assert len(workers()) == 2
            if how_it_ends:
                raise how_it_ends

    if how_it_ends:
        with pytest.raises(type(how_it_ends)) as raised:
            train()
        assert raised.value is how_it_ends
    else:
        train()
    assert workers() == []


def test_a_killed_worker_ends_training_in_one_line_that_names_it(tmp_path: Path):
    killed: list[tuple[int, float]] = []

    def train() -> None:
        with prefetched(batches_of(tmp_path), range(10**6), 2, CPU) as steps:
            next(steps)
            killed.append((workers()[0], time.monotonic()))
            os.kill(killed[0][0], signal.SIGKILL)
            while time.monotonic() < killed[0][1] + 20:
                time.sleep(0.01)  # a step that asks for no batch

    with pytest.raises(DataError) as report:
        train()
    ((pid, when),) = killed
    assert time.monotonic() - when < 1
    assert workers() == []
    assert report.value.printed_here
    assert str(report.value) == (
        f"data.workers: DataLoader worker (pid {pid}) is killed by signal: Killed, on {socket.gethostname()}; the same "
        "command goes on from the newest checkpoint (with data.workers=0 without workers)"
    )


def send_from_elsewhere(signum: int, pid: int) -> None:
    subprocess.run([sys.executable, "-c", f"import os; os.kill({pid}, {int(signum)})"], check=True)


def test_signals_to_all_processes_of_a_rank_are_for_the_rank(tmp_path: Path):
    with prefetched(batches_of(tmp_path), range(30), 1, CPU) as steps:
        first = next(steps)
        for signum in (signal.SIGINT, signal.SIGTERM):
            send_from_elsewhere(signum, workers()[0])
        time.sleep(0.2)
        assert len([first, *steps]) == 30
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_a_worker_ends_at_once_when_its_own_rank_terminates_it(tmp_path: Path):
    with prefetched(batches_of(tmp_path), range(10**6), 1, CPU) as steps:
        next(steps)
        (worker,) = multiprocessing.active_children()
        worker.terminate()  # as Python does with what is left when it exits, and then waits without end
        worker.join(2)
        assert worker.exitcode == 0


def test_ctrl_c_is_held_back_from_the_loader_once(tmp_path: Path):
    done = []

    def interrupted(times: int) -> None:
        with prefetch._undisturbed():
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
sys.path.insert(0, {tests!r})
from test_prefetch import batches_of, prefetched, CPU
with prefetched(batches_of(Path({folder!r})), range(10**6), 2, CPU) as steps:
    next(steps)
    print(*[process.pid for process in multiprocessing.active_children()], flush=True)
    {then}
"""


def begin(folder: Path, then: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A process with two workers, in a group of its own."""
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
    deadline = time.monotonic() + 4
    while any(Path(f"/proc/{pid}/stat").exists() and not is_zombie(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere workers look for their parent every 5 s")
def test_a_killed_rank_takes_its_workers_along(tmp_path: Path):
    process, pids = begin(tmp_path, "time.sleep(60)")
    process.kill()
    wait_until_gone(pids)
    process.communicate()


def test_ctrl_c_is_reported_by_the_rank_alone(tmp_path: Path):
    process, pids = begin(tmp_path, "[None for _ in steps]")
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    wait_until_gone(pids)
    assert re.findall(r"^\w*(?:Error|Interrupt)\b.*", errors, re.MULTILINE) == ["KeyboardInterrupt"], errors
