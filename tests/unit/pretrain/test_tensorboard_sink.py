"""A run in TensorBoard: each step once, nothing secret; and the effect of a failure on training."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import Field

from tost_lm.checkpointing.format import Progress
from tost_lm.config import validate
from tost_lm.pretrain.metrics import Metrics
from tost_lm.pretrain.settings import PretrainConfig

pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install '.[tensorboard]'")

SECRET = "planted-3f9a"
FOLDER = Path("runs/r/tensorboard")
SETTINGS: dict[str, Any] = {
    "model": {"layers": 1, "heads": 1, "width": 4, "vocab_size": 8, "max_positions": 8},
    "data": {"folder": "shards"},
    "train": {"steps": 20, "global_batch_size": 4, "micro_batch_size": 2, "seq_len": 8},
    "run": {"name": "r", "log_every": 1, "loggers": ["tensorboard"]},
}


class WithSecret(PretrainConfig):
    hub: dict[str, str] = Field(default={"token": SECRET, "user": "planted-user"})


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run folder, and no wandb: to import it fails."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    (tmp_path / "runs/r").mkdir(parents=True)


def open_metrics(progress: Progress | None, **run: Any) -> Metrics:
    settings = {**SETTINGS, "run": {**SETTINGS["run"], **run}}
    return Metrics(validate(WithSecret, settings, "test"), progress, 1, torch.device("cpu"))


def train(metrics: Metrics, first: int, last: int) -> None:
    """The loss of a step says in which launch it was trained; every fourth is followed by both measurements."""
    for step in range(first, last + 1):
        metrics.step(step, 100 * first + step, 1e-3, float("inf"))
        if step % 4 == 0:
            metrics.validation(
                {"step": step, "loss": 2.5, "position_ends": [4, 8], "loss_by_position": [3.5, None], "tokens": 32}
            )
            figures = {"accuracy": step / 100, "accuracy_standard_error": 0.01}
            names = {"protocol": "a@b", "headline": "accuracy", "data_sha256": "a"}
            metrics.evaluation({"step": step, **names, **figures})


def shown() -> dict[str, dict[int, float]]:
    """The scalars that TensorBoard shows: value by step."""
    from tensorboard.backend.event_processing.event_accumulator import (  # pyright: ignore[reportMissingImports]
        EventAccumulator,
    )

    events = EventAccumulator(str(FOLDER), size_guidance={"scalars": 0})
    events.Reload()
    scalars = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    assert all(len({event.step for event in found}) == len(found) for found in scalars.values())
    return {tag: {event.step: event.value for event in found} for tag, found in scalars.items()}


def test_a_run_that_was_killed_and_resumed_shows_each_step_once():
    train(open_metrics(None), 1, 9)  # killed: not closed
    resumed = open_metrics(Progress(5, 5))
    train(resumed, 6, 12)
    resumed.close()
    assert len(list(FOLDER.iterdir())) == 2
    found = shown()
    assert found["loss"] == {**{step: 100 + step for step in range(1, 6)}, **{s: 600 + s for s in range(6, 13)}}
    assert "grad_norm" not in found  # not finite, so null in metrics.jsonl
    assert found["validation/loss"] == {4: 2.5, 8: 2.5, 12: 2.5}
    assert found["validation/loss_by_position/4"] == {4: 3.5, 8: 3.5, 12: 3.5}
    assert "validation/loss_by_position/8" not in found
    assert found["evaluation/a@b/accuracy"] == pytest.approx({4: 0.04, 8: 0.08, 12: 0.12})


def test_a_run_that_restarts_before_its_first_checkpoint_shows_its_new_steps():
    train(open_metrics(None), 1, 9)
    again = open_metrics(None)
    train(again, 1, 2)
    again.close()
    assert shown()["lr"].keys() == {1, 2}


def test_a_logger_that_is_added_later_shows_the_earlier_steps():
    first = open_metrics(None, loggers=[])
    train(first, 1, 4)
    first.close()
    assert not FOLDER.exists()
    second = open_metrics(Progress(4, 4))
    train(second, 5, 6)
    second.close()
    assert shown()["loss"].keys() == {1, 2, 3, 4, 5, 6}
    assert shown()["evaluation/a@b/accuracy"].keys() == {4}


def test_the_settings_are_recorded_without_secrets():
    open_metrics(None).close()
    data = b"".join(file.read_bytes() for file in FOLDER.iterdir())
    assert b"planted-user" in data
    assert SECRET.encode() not in data


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's own thread
def test_training_goes_on_when_the_event_file_cannot_be_written():
    metrics = open_metrics(None)
    train(metrics, 1, 2)
    shutil.rmtree(FOLDER)
    train(metrics, 3, 8)
    metrics.close()
    assert len(Path("runs/r/metrics.jsonl").read_text().splitlines()) == 8
    log = Path("runs/r/log.txt").read_text()
    assert log.count("TensorBoard failed ([Errno 2] No such file or directory: ") == 1
