"""A run in TensorBoard: each step once, nothing secret; and the effect of a failure on training."""

import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from logged_run import SECRET, WithSecret, log_steps, settings_of

from tost_lm.checkpointing.format import Progress
from tost_lm.config import validate
from tost_lm.pretrain.metrics import Metrics

pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install '.[tensorboard]'")

FOLDER = Path("runs/r/tensorboard")


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run folder, and no wandb: to import it fails."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    (tmp_path / "runs/r").mkdir(parents=True)


def open_metrics(progress: Progress, **run: Any) -> Metrics:
    settings = settings_of(**{"loggers": ["tensorboard"], **run})
    return Metrics(validate(WithSecret, settings, "test"), progress, 1, torch.device("cpu"))


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
    log_steps(open_metrics(Progress(0, 0)), 1, 9, math.inf)  # killed: not closed
    resumed = open_metrics(Progress(5, 5))
    log_steps(resumed, 6, 12, math.inf)
    resumed.close()
    assert len(list(FOLDER.iterdir())) == 2
    found = shown()
    assert found["loss"] == {**{step: 1000 + step for step in range(1, 6)}, **{s: 6000 + s for s in range(6, 13)}}
    assert "grad_norm" not in found  # not finite, so null in metrics.jsonl
    assert found["validation/loss"] == {4: 2.5, 8: 2.5, 12: 2.5}
    assert found["validation/loss_by_position/4"] == {4: 3.5, 8: 3.5, 12: 3.5}
    assert "validation/loss_by_position/8" not in found
    assert found["evaluation/a@b/accuracy"] == pytest.approx({4: 0.04, 8: 0.08, 12: 0.12})


def test_a_run_that_restarts_before_its_first_checkpoint_shows_its_new_steps():
    log_steps(open_metrics(Progress(0, 0)), 1, 9)
    again = open_metrics(Progress(0, 0))
    log_steps(again, 1, 2)
    again.close()
    assert shown()["lr"].keys() == {1, 2}


def test_the_settings_are_recorded_without_secrets():
    open_metrics(Progress(0, 0)).close()
    data = b"".join(file.read_bytes() for file in FOLDER.iterdir())
    assert b"planted-user" in data
    assert SECRET.encode() not in data


def test_training_goes_on_without_event_files():
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    FOLDER.write_text("a file in the place of the folder")
    metrics = open_metrics(Progress(0, 0))
    log_steps(metrics, 1, 2)
    metrics.close()
    assert len(Path("runs/r/metrics.jsonl").read_text().splitlines()) == 2
    assert Path("runs/r/log.txt").read_text().count("tensorboard failed (") == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's own thread
def test_training_goes_on_when_the_event_file_cannot_be_written():
    metrics = open_metrics(Progress(0, 0))
    log_steps(metrics, 1, 2)
    shutil.rmtree(FOLDER)
    log_steps(metrics, 3, 8)
    metrics.close()
    assert len(Path("runs/r/metrics.jsonl").read_text().splitlines()) == 8
    log = Path("runs/r/log.txt").read_text()
    assert log.count("tensorboard failed ([Errno 2] No such file or directory: ") == 1
