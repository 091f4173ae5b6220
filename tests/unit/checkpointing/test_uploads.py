"""The last launch uploads to a URL, wherever it runs; and what it leaves there is complete."""

import json
import os
import re
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from test_format import write

from tost_lm.checkpointing.format import Progress
from tost_lm.checkpointing.run_folder import step_folder, step_folders
from tost_lm.checkpointing.settings import CheckpointConfig
from tost_lm.checkpointing.uploads import Uploads
from tost_lm.errors import CheckpointError, TrainingError
from tost_lm.remote import RemotePath

pytestmark = pytest.mark.quick


def test_a_launch_that_was_taken_over_writes_and_removes_nothing(tmp_path: Path):
    url, newest = RemotePath(f"file://{tmp_path}/bucket/run"), step_folder(tmp_path / "run", 4)
    write(newest)
    uploads = Uploads(url, tmp_path / "run")
    uploads.require_own()
    Uploads(url, Path("/later/run"))
    uploads.start(newest, CheckpointConfig())
    host = re.escape(socket.gethostname())
    later = rf"a later launch uploads there \(host {host}, pid {os.getpid()}, run folder /later/run, launch "
    with pytest.raises(CheckpointError, match=rf"not uploaded: \S+: {later}"):
        uploads.finish()
    with pytest.raises(TrainingError, match=later):
        uploads.require_own()
    assert not step_folders(url)


def test_the_end_of_a_run_finds_what_is_missing_at_the_url(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    url, run = RemotePath("memory://bucket/run"), tmp_path / "run"
    newest, older = step_folder(run, 8), step_folder(run, 4)
    for step, folder in ((4, older), (8, newest)):
        write(folder, step, {"training.json": json.dumps(asdict(Progress(step, step))).encode()})

    def upload() -> None:
        uploads = Uploads(url, run)
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
