"""The flight record of each surviving rank after a hang, a lost rank, and where the dump itself hangs."""

import ctypes
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from tost_lm.errors import LostRankError
from tost_lm.parallel import timeouts
from tost_lm.parallel.timeouts import Timeouts
from tost_lm.parallel.watchdog import Heartbeat, watch_ranks
from tost_lm.testing import run_on_ranks
from tost_lm.torch_internals import dump_flight_record, enable_flight_recorder

LAST = 7  # elements of the last collective, which rank 1 does not call


def rank_1_hangs() -> None:
    if dist.get_rank() == 1:
        time.sleep(1000)
    dist.all_reduce(torch.ones(LAST))


def rank_1_dies() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(LAST))


def rank_1_dies_and_the_others_hang() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(torch.ones(LAST))
    except RuntimeError:  # NCCL raises nothing
        time.sleep(1000)


def watched(fault: Callable[[], None], folder: Path) -> None:
    timeouts.DUMP_S = 100.0  # of a test machine, however slow it is
    enable_flight_recorder(folder / "flight_recorder")
    heartbeat = Heartbeat(folder / "heartbeats", dist.get_rank())
    try:
        with watch_ranks(heartbeat, Timeouts(3.0 if fault is rank_1_hangs else 600.0)):
            heartbeat.record(1, "training")
            dist.all_reduce(torch.ones(3))
            fault()
    except LostRankError:
        os._exit(2)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(rank_1_hangs, marks=pytest.mark.slow),
        pytest.param(rank_1_dies, marks=pytest.mark.quick),
        rank_1_dies_and_the_others_hang,
    ],
)
def test_every_surviving_rank_dumps_its_last_collectives(fault: Callable[[], None], tmp_path: Path):
    with pytest.raises(RuntimeError) as report:
        run_on_ranks(watched, 3, fault, tmp_path)
    survivors = {0, 1, 2} if fault is rank_1_hangs else {0, 2}
    assert {int(rank) for rank in re.findall(r"rank (\d) died with exit code 2", str(report.value))} == survivors
    records = records_in(tmp_path / "flight_recorder")
    assert records.keys() == survivors
    for rank, record in records.items():
        last = record["entries"][-1]
        assert last["profiling_name"] == "gloo:all_reduce"
        assert last["input_sizes"] == [[3 if rank == 1 else LAST]]
    if fault is rank_1_hangs:
        assert_torch_can_analyze(tmp_path / "flight_recorder")


def records_in(folder: Path) -> dict[int, dict[str, Any]]:
    return {int(path.name.removeprefix("rank_")): pickle.loads(path.read_bytes()) for path in folder.iterdir()}


def assert_torch_can_analyze(folder: Path) -> None:
    analyzer = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", "-j", folder]
    printed = subprocess.run(analyzer, capture_output=True, text=True, check=True)
    table = printed.stdout + printed.stderr
    assert table.count("all_reduce(input_sizes=[[3]]") == 3
    assert table.count(f"all_reduce(input_sizes=[[{LAST}]]") == 2


def hang_without_the_gil(*_: bool) -> bytes:
    time.sleep(1000)
    return b""


def hang_with_the_gil(*_: bool) -> bytes:
    ctypes.PyDLL(None).sleep(1000)
    return b""


def fail(*_: bool) -> bytes:
    raise RuntimeError("CUDA error")


def leave_the_process_group(*_: bool) -> bytes:
    dist.destroy_process_group()
    return b""


def dump_with(dump: Callable[..., bytes], folder: Path) -> None:
    _distributed_c10d._dump_fr_trace = dump  # pyright: ignore[reportAttributeAccessIssue]
    enable_flight_recorder(folder / "flight_recorder")
    dump_flight_record(timeouts.DUMP_S, timeouts.GIL_S)
    os._exit(2)


@pytest.mark.parametrize(
    ("dump", "code"), [(hang_without_the_gil, 2), (hang_with_the_gil, 1), (fail, 2), (leave_the_process_group, 2)]
)
def test_a_dump_that_hangs_or_fails_does_not_keep_the_process(dump: Callable[..., bytes], code: int, tmp_path: Path):
    with pytest.raises(RuntimeError, match=f"rank 0 died with exit code {code}"):
        run_on_ranks(dump_with, 1, dump, tmp_path)
    assert not (tmp_path / "flight_recorder").exists()


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path):
    (tmp_path / "flight_recorder").touch()
    with pytest.raises(RuntimeError) as report:
        run_on_ranks(watched, 3, rank_1_dies, tmp_path)
    assert len(re.findall(r"rank \d died with exit code 2", str(report.value))) == 2
