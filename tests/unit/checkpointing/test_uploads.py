"""One launch at a time uploads to a URL, wherever it runs; and what it leaves there is complete."""

import json
import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event, Thread
from typing import Any

import fsspec
import pytest
from test_format import write

from tost_lm.checkpointing import owner
from tost_lm.checkpointing.format import Progress
from tost_lm.checkpointing.run_folder import step_folder, step_folders
from tost_lm.checkpointing.settings import CheckpointConfig
from tost_lm.checkpointing.uploads import open_uploads
from tost_lm.errors import CheckpointError, ConfigError, TrainingError
from tost_lm.remote import RemotePath

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(owner, "BEAT_S", 0.2)
    monkeypatch.setattr(owner, "STALE_S", 0.4)


@pytest.fixture
def url(tmp_path: Path) -> RemotePath:
    return RemotePath(f"file://{tmp_path}/bucket/run")


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """The file of the record, written by a launch on another computer, which has ended."""
    path = tmp_path / "bucket/run/owner.json"
    path.parent.mkdir(parents=True)
    facts = {"owner": "host far, pid 7", "process": ["boot", "pid:[1]", "7", "123"], "launch": "0", "heartbeat": 1}
    path.write_text(json.dumps(facts))
    return path


def hold(url: RemotePath, pipe: Connection) -> None:
    with open_uploads(url, Path("first/run")):
        pipe.send("held")
        signal.pause()


def test_a_second_launch_is_refused_until_the_first_has_ended(
    url: RemotePath, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    ours, theirs = multiprocessing.Pipe()
    holder = multiprocessing.get_context("fork").Process(target=hold, args=(url, theirs))
    holder.start()
    assert ours.recv() == "held"
    who = f"host {socket.gethostname()}, pid {holder.pid}, run folder {Path.cwd()}/first/run"
    for _ in range(2):
        with pytest.raises(ConfigError) as refused, open_uploads(url, tmp_path / "second"):
            pass
        assert str(refused.value).startswith(f"{url}: another launch is using it ({who}); wait for it, stop it, or ")
    holder.kill()
    os.waitid(os.P_PID, holder.pid or 0, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    with open_uploads(url, tmp_path / "second"):
        assert f"pid {os.getpid()}" in (tmp_path / "bucket/run/owner.json").read_text()
    assert not (tmp_path / "bucket/run/owner.json").exists()
    assert capsys.readouterr().out == ""  # no wait
    holder.join()


def test_the_record_of_another_computer_counts_while_it_is_renewed(
    url: RemotePath, record: Path, capsys: pytest.CaptureFixture[str]
):
    facts, is_over = json.loads(record.read_text()), Event()

    def renew() -> None:
        while not is_over.wait(0.02):
            facts["heartbeat"] += 1
            record.write_text(json.dumps(facts))

    renewing = Thread(target=renew)
    renewing.start()
    with pytest.raises(ConfigError, match=r"another launch is using it \(host far, pid 7\)"), open_uploads(url, url):
        pass
    is_over.set()
    renewing.join()
    for text in (record.read_text(), '{"owner": "host fa'):  # killed while it wrote the record
        record.write_text(text)
        with open_uploads(url, url) as uploads:
            uploads.require_own()
    assert capsys.readouterr().out.count(f"{url}: waiting 0.4 s to see whether its last launch still runs") == 3


def test_a_launch_that_was_taken_over_writes_and_removes_nothing(url: RemotePath, record: Path, tmp_path: Path):
    theirs = record.read_text()
    newest = step_folder(tmp_path / "run", 4)
    write(newest)
    with open_uploads(url, tmp_path / "run") as uploads:
        record.write_text(theirs)
        uploads.start(newest, CheckpointConfig())
        with pytest.raises(
            CheckpointError, match=r"not uploaded: \S+: another launch has taken it over \(host far, pid"
        ):
            uploads.finish()
        with pytest.raises(TrainingError, match=r"another launch has taken it over \(host far, pid 7\)"):
            uploads.require_own()
    assert record.read_text() == theirs
    assert not step_folders(url)


@pytest.fixture
def memory() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/", recursive=True)


def test_the_end_of_a_run_finds_what_is_missing_at_the_url(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    url, run = RemotePath("memory://bucket/run"), tmp_path / "run"
    newest, older = step_folder(run, 8), step_folder(run, 4)
    for step, folder in ((4, older), (8, newest)):
        write(folder, step, {"training.json": json.dumps(asdict(Progress(step, step))).encode()})

    def upload() -> None:
        with open_uploads(url, run) as uploads:
            uploads.start(newest, CheckpointConfig())
            uploads.finish()

    put = type(memory).put_file
    lost = lambda self, source, target, **options: "model-" in target or put(self, source, target, **options)
    monkeypatch.setattr(type(memory), "put_file", lost)
    with pytest.raises(
        CheckpointError, match=rf"{newest}: saved, but not uploaded: {url}/\S+8: incomplete after its up"
    ):
        upload()
    monkeypatch.undo()
    upload()
    shard = next(newest.glob("model-*"))
    at_url = f"/bucket/run/checkpoints/{newest.name}/{shard.name}"
    for data in (b"", None):
        memory.pipe_file(at_url, data) if data is not None else memory.rm_file(at_url)
        upload()
        assert memory.cat_file(at_url) == shard.read_bytes()
    (older / "manifest.json").write_text("{}")  # the intact one at the URL stays
    intact = memory.cat_file(f"/bucket/run/checkpoints/{older.name}/manifest.json")
    upload()
    assert memory.cat_file(f"/bucket/run/checkpoints/{older.name}/manifest.json") == intact
