"""Two launches in one run folder under other names or without locks, and run folders that are moved in training."""

import errno
import fcntl
import json
import shutil
import signal
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
from launches import launch, train
from test_stopped_runs import assert_same_run, saved_steps

from tost_lm.checkpointing import owner, run_lock

RecordFault = Callable[[str, int, str], None]
ENDLESS = "train.steps=100000"


def test_a_launch_under_another_name_of_the_folder_is_refused(workplace: Path, record_fault: RecordFault):
    runs = workplace / "runs"
    (runs / "real").mkdir(parents=True)
    (runs / "tiny").symlink_to("real")
    with launch(workplace, 1, ENDLESS) as first:
        first.until(lambda: first.step() > 3)
        for name in ("real", "other"):
            (workplace / name).mkdir()
            for link in ("shards", "runs", "run.toml"):
                (workplace / name / link).symlink_to(workplace / link)
            if name == "other":
                (runs / "other").symlink_to(runs / "tiny")
            with launch(workplace / name, 1, ENDLESS, f"run.name={name}") as second:
                assert second.wait() == [2], second.output()
                (line,) = second.errors()
                assert f"runs/{name}: another launch is using it (host {socket.gethostname()}, pid " in line
                assert f"pid {first.pids[0]})" in line
    record_fault("two launches on two names of one run folder", 2, "the second is refused")


@pytest.mark.slow
def test_a_launch_whose_lock_file_is_removed_ends_before_it_writes_beside_another(
    workplace: Path, uninterrupted: Path, record_fault: RecordFault
):
    with launch(workplace, 2) as first:
        first.until(lambda: first.step() > 3)
        (workplace / "runs/.tiny.lock").unlink()
        first.wait()
        (line,) = first.errors()
        assert "runs/tiny: its lock file " in line
        assert "was removed during the run, so another launch may be using the folder; run the same" in line
    train(workplace, 2)
    assert_same_run(workplace / "runs/tiny", uninterrupted)
    record_fault("the lock file is removed during the run", 1, "the run ends; the next launch resumes bit-exactly")


def test_a_link_to_a_run_folder_stays(workplace: Path):
    (workplace / "runs").mkdir()
    (workplace / "runs/tiny").symlink_to(workplace / "elsewhere")  # which the launch makes
    train(workplace, 1, "train.steps=4", "run.stop_at_step=2")
    train(workplace, 1, "train.steps=4")
    assert (workplace / "runs/tiny").is_symlink()
    assert sorted(saved_steps(workplace / "elsewhere")) == [2, 4]


def without_locks(stale_s: float, rank: int) -> None:
    def fail(*arguments: Any) -> NoReturn:
        raise OSError(errno.ENOLCK, "No locks available")

    fcntl.lockf = fail
    run_lock.SETTLE_S, owner.BEAT_S, owner.STALE_S = 0.2, 0.2, stale_s


@pytest.mark.slow
def test_without_locks_an_owner_file_protects_the_run_folder(
    workplace: Path, uninterrupted: Path, record_fault: RecordFault
):
    owner_file = workplace / "runs/.tiny.owner"
    for name in ("second", "third"):
        (workplace / name).mkdir()
        for link in ("shards", "runs", "run.toml"):
            (workplace / name / link).symlink_to(workplace / link)
    no_locks = partial(without_locks, 120.0)
    with launch(workplace, 2, ENDLESS, inject=no_locks) as first:
        first.until(lambda: first.step() > 3)
        assert "/runs/.tiny.lock: No locks available; using .tiny.owner" in first.output()
        with launch(workplace / "second", 1, ENDLESS, inject=no_locks) as second:
            assert second.wait() == [2], second.output()
            (line,) = second.errors()
            assert f"runs/tiny: another launch is using it (host {socket.gethostname()}, pid {first.pids[0]}, " in line
        before = first.step()
        first.until(lambda: first.step() > before)
        first.send(signal.SIGTERM)
        assert first.wait() == [75, 75], first.output()
    assert not owner_file.exists()
    shutil.rmtree(workplace / "runs/tiny")
    with launch(workplace, 2, inject=no_locks) as first:
        first.until(lambda: saved_steps(workplace / "runs/tiny"))
        first.send(signal.SIGKILL)
        first.wait()
    assert owner_file.exists()
    with launch(workplace, 2, inject=partial(without_locks, 3.0)) as third:
        assert third.wait() == [0, 0], third.output()
    assert_same_run(workplace / "runs/tiny", uninterrupted)
    record_fault("two launches on a file system without locks", 2, "the second is refused; a stale owner is ignored")


def test_a_launch_whose_owner_file_was_taken_over_saves_nothing_more(workplace: Path):
    with launch(workplace, 2, ENDLESS, inject=partial(without_locks, 120.0)) as running:
        running.until(lambda: running.step() > 3)
        record = {"owner": "host other, pid 7", "process": [], "launch": "0"}
        (workplace / "runs/.tiny.owner").write_text(json.dumps(record))
        at = running.step()
        assert set(running.wait()) == {2}, running.output()
        (line,) = running.errors()
        assert line.startswith("runs/tiny: another launch has taken it over (host other, pid 7)")
    assert max(saved_steps(workplace / "runs/tiny"), default=0) <= at + 10
    assert json.loads((workplace / "runs/.tiny.owner").read_text()) == record


@pytest.mark.slow
def test_a_run_folder_that_is_moved_ends_the_run(workplace: Path, uninterrupted: Path, record_fault: RecordFault):
    runs = workplace / "runs"
    for _ in range(2):
        with launch(workplace, 2) as running:
            newest = max(saved_steps(runs / "tiny"), default=0)
            running.until(lambda: max(saved_steps(runs / "tiny"), default=0) > newest)
            (runs / "tiny").rename(runs / "moved")
            assert set(running.wait()) == {2}, running.output()
            (line,) = running.errors()
            assert line.startswith("runs/tiny: was moved or replaced during the run; move it back and run the same")
        assert not (runs / "tiny").exists()
        (runs / "moved").rename(runs / "tiny")
    train(workplace, 2)
    assert_same_run(runs / "tiny", uninterrupted)
    record_fault("the run folder is moved", 2, "one line, no second folder; moved back, it resumes bit-exactly")
