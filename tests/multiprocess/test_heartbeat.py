"""A rank's heartbeat; how one whose heart stopped is found and named; SIGTERM; ranks that are started again."""

import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from tost_lm.parallel.failures import LostRankError, naming_lost_ranks
from tost_lm.parallel.heartbeat import Heartbeat, read_heartbeats
from tost_lm.parallel.world import start_world
from tost_lm.testing import run_on_ranks

HOST = os.uname().nodename
TIMEOUT_S = 1.0
BUSY_MACHINE_S = 20  # what may come on top of the promised 2 s


def all_meet() -> None:
    dist.all_reduce(torch.ones(1000))


def test_a_heartbeat_is_one_whole_line_in_a_file_of_its_rank(tmp_path: Path):
    folder = tmp_path / "runs/tiny/heartbeats"
    heart = Heartbeat(folder, 3)
    assert heart.last[:5] == (3, HOST, os.getpid(), 0, "building")
    assert not folder.exists()  # before the first beat the folder may be another run's
    began = time.time()
    heart.beat(17, "training")
    (beat,) = read_heartbeats(folder).values()
    assert beat == heart.last
    assert beat[:5] == (3, HOST, os.getpid(), 17, "training")
    assert abs(beat.time - began) < BUSY_MACHINE_S
    assert [path.name for path in folder.iterdir()] == ["rank_00003.json"]
    assert (folder / "rank_00003.json").read_text().count("\n") == 1


def test_who_reads_while_a_rank_writes_finds_whole_lines(tmp_path: Path):
    heart, beats, over = Heartbeat(tmp_path, 0), [], threading.Event()
    heart.beat(0, "building")

    def read() -> None:
        while not over.is_set():
            beats.append(read_heartbeats(tmp_path))

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(3000):
        heart.beat(step * 7**step % 10**9, "leaving" if step % 2 else "validation")
    over.set()
    reader.join()
    assert len(beats) > 20
    assert all(list(beat) == [0] for beat in beats)


def test_a_heartbeat_outlives_what_happens_to_its_folder(tmp_path: Path):
    folder = tmp_path / "heartbeats"
    folder.mkdir()
    (folder / "rank_00000.json").write_text("what an earlier launch left" * 9)
    heart = Heartbeat(folder, 0)
    heart.beat(0, "building")
    assert read_heartbeats(folder)[0] == heart.last
    folder.rename(tmp_path / "aside")
    heart.beat(1, "training")
    assert read_heartbeats(folder)[0] == heart.last
    shutil.rmtree(folder)
    folder.touch()  # nothing can be written any more
    heart.beat(2, "training")
    assert heart.last.step == 2


def test_files_of_ranks_that_are_no_more_go(tmp_path: Path):
    for rank in (0, 1, 2, 11):
        Heartbeat(tmp_path, rank).beat(5, "saving")
    (tmp_path / "rank_of_mine.json").touch()
    Heartbeat(tmp_path, 0).remove_ranks_from(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "rank_00000.json",
        "rank_00001.json",
        "rank_of_mine.json",
    ]


def rank_1_stops(heart: Heartbeat) -> None:
    heart.beat(17, "training")
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    all_meet()


def rank_1_reads(heart: Heartbeat) -> None:
    heart.beat(18, "reading")
    if dist.get_rank() == 1:
        time.sleep(100)
    heart.beat(18, "training")
    all_meet()


def rank_0_is_ahead_and_gloo_gives_up(heart: Heartbeat) -> None:
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S / 2))
    heart.beat(18, "training")
    if dist.get_rank() == 0:
        heart.beat(18, "saving")
        time.sleep(100)
    dist.all_reduce(torch.ones(1), group=group)


def every_rank_waits(heart: Heartbeat) -> None:
    heart.beat(4, "validation")
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=None if dist.get_rank() == 1 else group)


def watched(what: Callable[[Heartbeat], None], port: int, folder: Path) -> None:
    """`what` under naming_lost_ranks, in a world of torchrun's kind; stderr goes to a file."""
    os.dup2(os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    join(port)
    heart = Heartbeat(folder / "heartbeats", dist.get_rank())
    try:
        with naming_lost_ranks(heart, TIMEOUT_S):
            all_meet()
            (folder / f"{dist.get_rank()}.began").touch()
            what(heart)
    except LostRankError as error:
        if error.printed_here:
            os.write(2, f"error: {error}\n".encode())
        os._exit(2)


def join(port: int) -> None:
    """Leave the group of run_on_ranks for one that meets in a store as torchrun holds it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # gloo fails on a rank that still connects when another one leaves
    dist.destroy_process_group()
    launcher = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in (launcher | place).items()})
    start_world("cpu", TIMEOUT_S)


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


NAME = rf"rank {{}} \({re.escape(HOST)}, pid \d+\)"


@pytest.mark.parametrize(
    ("what", "line", "ended"),
    [
        (
            rank_1_stops,
            NAME.format(1) + r" was lost: it does not answer; its last step was 17 \(training, \d+ s ago\)",
            [0, 2],
        ),
        (
            rank_1_reads,
            NAME.format(1) + r" is stuck: reading step 18 for \d+ s, while the others wait in training of step 18",
            [0, 1, 2],
        ),
        (
            rank_0_is_ahead_and_gloo_gives_up,
            NAME.format(0) + r" is stuck: saving step 18 for \d+ s, while the others wait in training of step 18",
            [0, 1, 2],
        ),
        (
            every_rank_waits,
            r"no rank goes on, though every rank answers: all stand in validation of step 4 for \d+ s",
            [0, 1, 2],
        ),
    ],
)
def test_a_rank_that_hangs_ends_the_run_with_one_line_that_names_it(
    what: Callable[[Heartbeat], None], line: str, ended: list[int], store: TCPStore, tmp_path: Path
):
    with pytest.raises(RuntimeError) as report:
        run_on_ranks(watched, 3, what, store.port, tmp_path, timeout_s=60)
    over = time.time()
    hung = max(path.stat().st_mtime for path in tmp_path.glob("*.began"))
    assert over - hung < TIMEOUT_S + 2 + 2 + BUSY_MACHINE_S  # run_on_ranks waits 2 s for the stopped one
    assert [rank for rank in range(3) if f"rank {rank} died with exit code 2" in str(report.value)] == ended
    (said,) = re.findall("^error: (.*)$", (tmp_path / "stderr").read_text(), re.MULTILINE)
    assert re.fullmatch(line, said), said


def steps_that_take_less_than_the_limit(folder: Path) -> str:
    heart = Heartbeat(folder, dist.get_rank())
    with naming_lost_ranks(heart, 2.0):
        for step in range(5):
            heart.beat(step, "training")
            time.sleep(0.6)
            all_meet()
    return heart.last.phase


def test_a_run_that_goes_on_is_left_alone(tmp_path: Path):
    assert run_on_ranks(steps_that_take_less_than_the_limit, 2, tmp_path) == ["training"] * 2


def a_job_that_is_stopped_for_a_while(folder: Path) -> float:
    heart, began = Heartbeat(folder, dist.get_rank()), time.monotonic()
    with naming_lost_ranks(heart, 3.0):
        heart.beat(1, "training")
        dist.barrier()
        if dist.get_rank() == 0:
            ranks = " ".join(str(beat.pid) for beat in read_heartbeats(folder).values())
            subprocess.Popen(["sh", "-c", f"kill -STOP {ranks}; sleep 5; kill -CONT {ranks}"])
        time.sleep(1.5)
        all_meet()
    return time.monotonic() - began


def test_a_job_that_its_scheduler_stops_for_a_while_is_not_taken_for_hung(tmp_path: Path):
    assert min(run_on_ranks(a_job_that_is_stopped_for_a_while, 2, tmp_path)) > 4


def told_to_leave(handler_before: bool) -> list[object]:
    asked: list[str] = []
    if handler_before:
        signal.signal(signal.SIGTERM, lambda *_: asked.append("the program's handler"))
    before = signal.getsignal(signal.SIGTERM)
    with naming_lost_ranks(on_terminate=lambda: asked.append("on_terminate")):
        all_meet()
        os.kill(os.getpid(), signal.SIGTERM)
        all_meet()  # all go on, and leave together
    return [*asked, signal.getsignal(signal.SIGTERM) == before]


@pytest.mark.parametrize("handler_before", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_while_all_is_well_is_for_the_run_to_answer(handler_before: bool, ranks: int):
    assert run_on_ranks(told_to_leave, ranks, handler_before) == [["on_terminate", True]] * ranks


def told_to_leave_because_of_another(notes: Path) -> None:
    try:
        with naming_lost_ranks(on_terminate=(notes / f"{dist.get_rank()}.asked").touch):
            all_meet()
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            (notes / str(dist.get_rank())).write_text(str(os.getpid()))
            time.sleep(100)  # not in a collective: only SIGTERM brings it here
    except LostRankError as error:
        (notes / f"{dist.get_rank()}.line").write_text(str(error))
        raise


def test_sigterm_because_of_a_lost_rank_names_it(tmp_path: Path):
    def terminate() -> None:
        while not all((tmp_path / str(rank)).exists() for rank in (0, 2)):
            time.sleep(0.05)
        time.sleep(1)
        for rank in (0, 2):
            os.kill(int((tmp_path / str(rank)).read_text()), signal.SIGTERM)

    launcher = threading.Thread(target=terminate)
    launcher.start()
    with pytest.raises(RuntimeError, match="rank 1 died with exit code -9"):
        run_on_ranks(told_to_leave_because_of_another, 3, tmp_path, timeout_s=20)
    launcher.join()
    assert not list(tmp_path.glob("*.asked"))
    lines = {(tmp_path / f"{rank}.line").read_text() for rank in (0, 2)}
    assert len(lines) == 1
    assert re.fullmatch(NAME.format(1) + " was lost: its process is gone", lines.pop())


def attempt(killed: int, port: int) -> float:
    join(port)
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.all_reduce(total, group=dist.new_group())
    if dist.get_rank() == killed:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) if killed >= 0 else nullcontext():
        dist.all_reduce(total)
    return total.item()


def test_ranks_that_are_started_again_meet_each_other_and_not_the_dead_ones(store: TCPStore):
    for killed in (0, 1, 2):
        with pytest.raises(RuntimeError) as report:
            run_on_ranks(attempt, 3, killed, store.port, timeout_s=20)
        assert str(report.value).startswith(f"rank {killed} died with exit code -9")
        assert "did not come" not in str(report.value)
    assert run_on_ranks(attempt, 3, -1, store.port) == [27.0] * 3  # three sums over three ranks
