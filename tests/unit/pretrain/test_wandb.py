"""wandb's own files hold one run and nothing secret; and training continues without wandb."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from logged_run import SECRET, WithSecret, log_steps, settings_of
from wandb_files import history

from tost_lm.checkpointing.format import Progress
from tost_lm.config import validate
from tost_lm.errors import ConfigError
from tost_lm.pretrain.metrics import Metrics, write_run_folder
from tost_lm.pretrain.settings import PretrainConfig

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("WANDB_API_KEY", SECRET.ljust(40, "0"))
    monkeypatch.setattr(sys, "argv", ["train.py", f"hub.token={SECRET}", "--password", SECRET, "run.name=r"])
    (tmp_path / "runs/r").mkdir(parents=True)
    return tmp_path / "runs/r"


def open_metrics(progress: Progress, **run: Any) -> Metrics:
    settings = settings_of(**run)
    config = validate(PretrainConfig, settings, "test")
    write_run_folder(config, world_size=1, device="cpu", planned={})
    return Metrics(validate(WithSecret, settings, "test"), progress, 1, CPU)


def train_until_killed() -> None:
    """A process of its own: steps 1 to 9, and no end."""
    metrics = open_metrics(Progress(0, 0))
    log_steps(metrics, 1, 9)
    print("id", metrics.wandb_run_id, flush=True)
    signal.pause()


@pytest.mark.quick
def test_a_run_that_was_killed_and_resumed_is_one_run(folder: Path):
    environment = {
        **os.environ,
        "WANDB__TRANSACTION_LOG_FLUSH_INTERVAL": "0.1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    with subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout
        run_id = next(line.split()[1] for line in process.stdout if line.startswith("id "))
        while not any(row["_step"] == 8 for history in histories(folder).values() for row in history):
            time.sleep(0.05)  # steps that are to be trained again are in its file
        process.kill()
    wait_until_wandb_is_gone(folder)

    resumed = open_metrics(Progress(5, 5, wandb_run_id=run_id))
    assert resumed.wandb_run_id == run_id
    log_steps(resumed, 6, 12)
    resumed.close()
    before, after = histories(folder)
    assert before.name == after.name == f"run-{run_id}.wandb"
    assert [row["_step"] for row in rows_of(before)][:8] == list(range(1, 9))
    rows = rows_of(before)[:5] + rows_of(after)
    assert [row["_step"] for row in rows] == list(range(1, 13))
    assert [row["loss"] for row in rows] == [1000 + s for s in range(1, 6)] + [6000 + s for s in range(6, 13)]
    assert [row["_step"] for row in rows if "validation/loss" in row] == [4, 8, 12]
    assert all(row["validation/loss_by_position/4"] == 3.5 for row in rows if "validation/loss" in row)
    headlines = {row["_step"]: row["evaluation/a@b/accuracy"] for row in rows if "evaluation/a@b/accuracy" in row}
    assert headlines == {4: 0.04, 8: 0.08, 12: 0.12}

    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert [path for path, data in files.items() if SECRET.encode() in data] == []
    assert b"planted-user" in files[before]  # the settings are there
    assert json.loads(files[folder / "env.json"])["command"] == [
        "tost", "train", "hub.token=[redacted]", "--password", "[redacted]", "run.name=r",
    ]  # fmt: skip


def test_training_goes_on_when_the_process_of_wandb_is_killed(folder: Path, capfd: pytest.CaptureFixture[str]):
    metrics = open_metrics(Progress(0, 0))
    (core,) = [child for child in psutil.Process().children() if child.name() == "wandb-core"]
    core.kill()
    step = 0
    while "wandb failed" not in capfd.readouterr().out:
        step += 1
        log_steps(metrics, step, step)
        time.sleep(0.05)
    log_steps(metrics, step + 1, step + 5)
    metrics.close()
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == step + 5
    assert (folder / "log.txt").read_text().count("wandb failed") == 1


@pytest.mark.parametrize("mode", ["sometimes", "online"])
def test_a_mode_that_does_not_exist_and_one_without_a_login_are_errors(monkeypatch: pytest.MonkeyPatch, mode: str):
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # no server, and no login for it
    monkeypatch.setenv("WANDB_MODE", mode)
    fix = "set it to offline, or leave wandb out of run.loggers"
    with pytest.raises(ConfigError, match=rf"\AWANDB_MODE={mode}: .*; {fix}\Z"):
        open_metrics(Progress(0, 0))


def wait_until_wandb_is_gone(folder: Path) -> None:
    """A killed process leaves one of wandb's behind, which writes what it has and ends by itself."""
    files = str(next(folder.glob("wandb/offline-run-*/run-*.wandb")))
    while any(files in [file.path for file in open_files(process)] for process in psutil.process_iter()):
        time.sleep(0.05)


def open_files(process: psutil.Process) -> list[Any]:
    try:
        return process.open_files()
    except psutil.Error:
        return []


def histories(folder: Path) -> dict[Path, list[dict[str, Any]]]:
    """The rows of every offline file of wandb."""
    return {path: rows_of(path) for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))}


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row.item}
        for row in history(path)
    ]


if __name__ == "__main__":
    train_until_killed()
