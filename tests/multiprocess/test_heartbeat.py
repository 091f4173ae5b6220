"""Heartbeat files, heartbeat timeouts, SIGTERM, and ranks that are restarted."""

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

from tost_lm.errors import LostRankError
from tost_lm.parallel import timeouts
from tost_lm.parallel.mesh import start_world
from tost_lm.parallel.timeouts import Timeouts
from tost_lm.parallel.watchdog import Heartbeat, read_heartbeats, watch_ranks
from tost_lm.testing import run_on_ranks

HOST = os.uname().nodename
TIMEOUT_S = 3.0


def all_meet() -> None:
    dist.all_reduce(torch.ones(1000))


def test_a_heartbeat_is_one_line_in_the_file_of_its_rank(tmp_path: Path):
    folder = tmp_path / "runs/tiny/heartbeats"
    heartbeat = Heartbeat(folder, 3)
    assert heartbeat.last[:5] == (3, HOST, os.getpid(), 0, "building")
    assert not folder.exists()  # it may belong to another run until the first heartbeat
    heartbeat.record(16, "training")
    assert not folder.parent.exists()  # a run folder that was moved is not made again
    folder.parent.mkdir(parents=True)
    began = time.time()
    heartbeat.record(17, "training")
    (beat,) = read_heartbeats(folder).values()
    assert beat == heartbeat.last
    assert beat[:5] == (3, HOST, os.getpid(), 17, "training")
    assert began - 0.001 <= beat.time <= time.time() + 0.001  # written in whole milliseconds
    assert [path.name for path in folder.iterdir()] == ["rank_00003.json"]
    assert (folder / "rank_00003.json").read_text().count("\n") == 1


def test_a_reader_finds_only_whole_lines_while_a_rank_writes(tmp_path: Path):
    heartbeat, beats, over = Heartbeat(tmp_path, 0), [], threading.Event()
    heartbeat.record(0, "building")

    def read() -> None:
        while not over.is_set():
            beats.append(read_heartbeats(tmp_path))

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(3000):
        heartbeat.record(step * 7**step % 10**9, "leaving" if step % 2 else "validation")
    over.set()
    reader.join()
    assert len(beats) > 20
    assert all(list(beat) == [0] for beat in beats)


def test_quick_steps_write_one_heartbeat_a_second_and_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    writes, began = list[bytes](), time.monotonic()
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, line, at: writes.append(line) or pwrite(file, line, at))
    heartbeat = Heartbeat(tmp_path, 0)
    for step in range(1000):
        heartbeat.record(step, "reading")
        heartbeat.record(step, "training")
    while read_heartbeats(tmp_path)[0] != heartbeat.last:
        assert time.monotonic() < began + 10
    assert len(writes) <= 2 + (time.monotonic() - began) / timeouts.WRITE_S
    heartbeat.record(1000, "saving")
    assert read_heartbeats(tmp_path)[0][3:5] == (1000, "saving")


def test_a_heartbeat_survives_changes_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timeouts, "WRITE_S", 0.0)
    folder = tmp_path / "heartbeats"
    folder.mkdir()
    (folder / "rank_00000.json").write_text("a file of an earlier launch" * 9)
    heartbeat = Heartbeat(folder, 0)
    heartbeat.record(0, "building")
    assert read_heartbeats(folder)[0] == heartbeat.last
    folder.rename(tmp_path / "aside")
    heartbeat.record(1, "training")
    assert read_heartbeats(folder)[0] == heartbeat.last
    shutil.rmtree(folder)
    folder.touch()  # nothing can be written here
    heartbeat.record(2, "training")
    assert heartbeat.last.step == 2


def rank_1_stops(heartbeat: Heartbeat) -> None:
    heartbeat.record(17, "training")
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    all_meet()


def rank_1_reads(heartbeat: Heartbeat) -> None:
    heartbeat.record(18, "reading")
    if dist.get_rank() == 1:
        time.sleep(100)
    heartbeat.record(18, "training")
    all_meet()


def rank_0_is_ahead_and_gloo_gives_up(heartbeat: Heartbeat) -> None:
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S / 2))
    heartbeat.record(18, "training")
    if dist.get_rank() == 0:
        heartbeat.record(18, "saving")
        time.sleep(100)
    dist.all_reduce(torch.ones(1), group=group)


def every_rank_waits(heartbeat: Heartbeat) -> None:
    heartbeat.record(4, "validation")
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=None if dist.get_rank() == 1 else group)


def watched(fault: Callable[[Heartbeat], None], port: int, folder: Path) -> None:
    """Call `fault` under watch_ranks, in a world like torchrun's; stderr goes to a file."""
    os.dup2(os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    join(port)
    heartbeat = Heartbeat(folder / "heartbeats", dist.get_rank())
    try:
        with watch_ranks(heartbeat, Timeouts(TIMEOUT_S)):
            all_meet()
            fault(heartbeat)
    except LostRankError as error:
        if error.printed_here:
            os.write(2, f"error: {error}\n".encode())
        os._exit(2)


def join(port: int) -> None:
    """Replace the process group of run_on_ranks by one with a store like torchrun's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # gloo fails if a rank leaves while another one still connects
    dist.destroy_process_group()
    launcher = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    own = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in (launcher | own).items()})
    start_world("cpu", Timeouts(TIMEOUT_S))


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


NAME = rf"rank {{}} \({re.escape(HOST)}, pid \d+\)"


@pytest.mark.parametrize(
    ("fault", "line", "ended"),
    [
        (
            rank_1_stops,
            NAME.format(1) + r" was lost: it does not answer; its last step was 17 \(training, \d+ s ago\)",
            [0, 2],
        ),
        (
            rank_1_reads,
            NAME.format(1) + r" hangs: reading of step 18 for \d+ s, while the others wait in training of step 18",
            [0, 1, 2],
        ),
        (
            rank_0_is_ahead_and_gloo_gives_up,
            NAME.format(0) + r" hangs: saving of step 18 for \d+ s, while the others wait in training of step 18",
            [0, 1, 2],
        ),
        (
            every_rank_waits,
            r"all ranks hang, though every rank answers: validation of step 4 for \d+ s",
            [0, 1, 2],
        ),
    ],
)
def test_a_rank_that_hangs_ends_the_run_with_one_line_that_names_it(
    fault: Callable[[Heartbeat], None], line: str, ended: list[int], store: TCPStore, tmp_path: Path
):
    with pytest.raises(RuntimeError) as report:
        run_on_ranks(watched, 3, fault, store.port, tmp_path)
    assert [rank for rank in range(3) if f"rank {rank} died with exit code 2" in str(report.value)] == ended
    (error,) = re.findall("^error: (.*)$", (tmp_path / "stderr").read_text(), re.MULTILINE)
    assert re.fullmatch(line, error), error


def stop_the_whole_job_for_a_while(folder: Path) -> float:
    heartbeat, began = Heartbeat(folder, dist.get_rank()), time.monotonic()
    with watch_ranks(heartbeat, Timeouts(3.0)):
        heartbeat.record(1, "training")
        dist.barrier()
        if dist.get_rank() == 0:
            ranks = " ".join(str(beat.pid) for beat in read_heartbeats(folder).values())
            subprocess.Popen(["sh", "-c", f"kill -STOP {ranks}; sleep 5; kill -CONT {ranks}"])
        time.sleep(1.5)
        all_meet()
    return time.monotonic() - began


@pytest.mark.slow
def test_a_job_that_its_scheduler_stops_for_a_while_does_not_hang(tmp_path: Path):
    assert min(run_on_ranks(stop_the_whole_job_for_a_while, 2, tmp_path)) > 4


def get_sigterm(handler_before: bool) -> list[object]:
    called: list[str] = []
    if handler_before:
        signal.signal(signal.SIGTERM, lambda *_: called.append("the program's handler"))
    before = signal.getsignal(signal.SIGTERM)
    with watch_ranks(on_terminate=lambda: called.append("on_terminate")):
        all_meet()
        os.kill(os.getpid(), signal.SIGTERM)
        all_meet()  # every rank continues; they stop together
    return [*called, signal.getsignal(signal.SIGTERM) == before]


@pytest.mark.parametrize("handler_before", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_without_a_lost_rank_calls_on_terminate(handler_before: bool, ranks: int):
    assert run_on_ranks(get_sigterm, ranks, handler_before) == [["on_terminate", True]] * ranks


def get_sigterm_after_a_rank_died(notes: Path) -> None:
    timeouts.EXIT_S = 100.0  # only SIGTERM ends the ranks
    try:
        with watch_ranks(on_terminate=(notes / f"{dist.get_rank()}.terminated").touch):
            all_meet()
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            (notes / str(dist.get_rank())).write_text(str(os.getpid()))
            time.sleep(100)
    except LostRankError as error:
        (notes / f"{dist.get_rank()}.line").write_text(str(error))
        raise


def test_sigterm_after_a_rank_was_lost_names_it(tmp_path: Path):
    def terminate() -> None:
        while not all((tmp_path / str(rank)).exists() for rank in (0, 2)):
            time.sleep(0.05)
        time.sleep(1)
        for rank in (0, 2):
            os.kill(int((tmp_path / str(rank)).read_text()), signal.SIGTERM)

    launcher = threading.Thread(target=terminate)
    launcher.start()
    with pytest.raises(RuntimeError, match="rank 1 died with exit code -9"):
        run_on_ranks(get_sigterm_after_a_rank_died, 3, tmp_path)
    launcher.join()
    assert not list(tmp_path.glob("*.terminated"))
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


@pytest.mark.quick
def test_restarted_ranks_join_each_other_and_not_the_dead_ones(store: TCPStore):
    for killed in (0, 1, 2):
        with pytest.raises(RuntimeError) as report:
            run_on_ranks(attempt, 3, killed, store.port)
        assert str(report.value).startswith(f"rank {killed} died with exit code -9")
        assert "did not join" not in str(report.value)
    assert run_on_ranks(attempt, 3, -1, store.port) == [27.0] * 3  # three sums over three ranks
