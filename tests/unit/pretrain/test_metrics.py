"""Rows, lines and events that rank 0 writes, and which of them remain after a resume."""

import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from logged_run import SETTINGS
from stage_records import recorded

from tost_lm.checkpointing.format import Progress
from tost_lm.config import validate
from tost_lm.parallel.settings import ParallelConfig
from tost_lm.pretrain.metrics import Metrics
from tost_lm.pretrain.settings import PretrainConfig

CPU = torch.device("cpu")
FLOPS = 1e9
"""Of the steps of a row."""
FOLDER = Path("runs/r")

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run folder, and no wandb: to import it fails."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setitem(sys.modules, "wandb", None)
    FOLDER.mkdir(parents=True)


def config() -> PretrainConfig:
    return validate(PretrainConfig, SETTINGS, "test")


def values(loss: float, lr: float, grad_norm: float) -> dict[str, float]:
    return {"loss": loss, "lr": lr, "grad_norm": grad_norm}


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]


def validation_row(step: int) -> dict[str, Any]:
    return {"step": step, "loss": 2.5, "position_ends": [8], "loss_by_position": [2.5], "sequences": 4, "tokens": 32}


def evaluation_row(step: int) -> dict[str, Any]:
    figures = {"accuracy": 0.25, "accuracy_standard_error": 0.0123456, "examples": 9}
    return {"step": step, "protocol": "lambada_openai@lm-eval", "headline": "accuracy", "data_sha256": "a", **figures}


def test_numbers_by_name_are_logged(capsys: pytest.CaptureFixture[str]):
    metrics = Metrics(config(), Progress(0, 0), 1, CPU)
    metrics.step(5, {"loss": 2.0, "z_loss": 0.0123, "lr": 5e-4, "grad_norm": 0.25}, FLOPS)
    metrics.close()
    [row] = rows("metrics")
    assert (row["loss"], row["z_loss"]) == (2.0, 0.0123)
    assert "  loss 2.0000  z loss 1.23e-02  lr " in capsys.readouterr().out


def test_a_row_holds_what_follows_from_its_step(capsys: pytest.CaptureFixture[str]):
    metrics = Metrics(config(), Progress(0, 0, stages=(recorded(config()),)), 2, CPU)
    metrics.step(1, values(3.0, 1e-3, 0.5), FLOPS)
    metrics.step(5, values(2.0, 5e-4, 0.25), FLOPS)
    metrics.close()
    _, row = rows("metrics")
    assert {name: row[name] for name in ("step", "loss", "lr", "grad_norm", "tokens", "mfu")} == {
        "step": 5, "loss": 2.0, "lr": 5e-4, "grad_norm": 0.25, "tokens": 5 * 32, "mfu": None,
    }  # fmt: skip
    assert "z_loss" not in row
    assert row["tokens_per_second"] == 2 * row["tokens_per_second_device"]
    steps_per_second = row["tokens_per_second"] / config().batch_tokens
    assert row["tflops_device"] == pytest.approx(FLOPS / 4 * steps_per_second / 2 / 1e12)
    assert row["memory_peak_bytes"] > 10_000_000
    assert row["seconds"] > rows("metrics")[0]["seconds"]
    line = capsys.readouterr().out.splitlines()[-1]
    expected = r"step 5/20  loss 2\.0000  lr 5\.0e-04  grad norm 0\.250  [\d,]+ tokens/s/device  \S+ TFLOP/s  ETA \d+:"
    assert re.match(expected, line)
    assert re.fullmatch(TIME + re.escape(line), (FOLDER / "log.txt").read_text().splitlines()[-1])


def test_pauses_are_time_of_the_run_but_not_of_its_tokens():
    metrics = Metrics(config(), Progress(0, 0), 1, CPU)
    for _ in range(2):
        with metrics.paused():
            time.sleep(0.2)
    metrics.step(1, values(3.0, 1e-3, 0.5), FLOPS)
    metrics.close()
    (row,) = rows("metrics")
    assert row["seconds"] >= 0.4
    assert row["tokens"] / row["tokens_per_second"] < row["seconds"] - 0.39


def test_goodput_is_the_part_of_the_time_since_the_first_launch_that_is_in_steps():
    """Neither a pause, nor the time between two launches, nor steps that are trained again."""
    launched = {}
    for name, step, pause in (("first", 0, 0.2), ("second", 1, 0.0)):
        began = time.perf_counter()
        metrics = Metrics(config(), Progress(step, step), 1, CPU)
        with metrics.paused():
            time.sleep(pause)
        for n in (step + 1, step + 2):
            time.sleep(0.05)
            metrics.step(n, values(3.0, 1e-3, 0.5), FLOPS)
        metrics.close()
        launched[name] = time.perf_counter() - began
        time.sleep(1.0)
    first, _, third = rows("metrics")
    assert third["step_seconds"] >= 3 * 0.05
    assert third["step_seconds"] - first["step_seconds"] <= launched["second"]
    assert third["goodput"] <= third["step_seconds"] / (third["step_seconds"] + 1.2)


@pytest.mark.parametrize(("ranks", "named"), [(1, "rank 2,"), (2, "ranks 2-3,")])
def test_a_straggler_is_named_in_its_second_row(capsys: pytest.CaptureFixture[str], ranks: int, named: str):
    metrics = Metrics(config().model_copy(update={"parallel": ParallelConfig(tensor=ranks)}), Progress(0, 0), 4, CPU)
    even = [0.0, 0.4, 0.0, 0.4, 0.05, 0.4, 0.0, 0.4]
    slow = [0.0, 0.4, 0.1, 0.4, 0.2, 0.4, 0.0, 0.3]
    for step, seconds in enumerate(([0.1, 0.0] * 4, slow, even, slow, slow, slow), start=1):
        metrics.step(2 * step, values(3.0, 1e-3, 0.5), FLOPS, seconds)
    metrics.close()
    found = rows("metrics")
    assert [row.get("slowest_rank") for row in found] == [None, 2, 2, 2, 2, 2]
    assert [row["slowest_over_median"] for row in found[1:3]] == pytest.approx([0.6 / 0.4, 0.45 / 0.4])
    assert found[1]["data_wait"] == pytest.approx(0.2 * found[1]["tokens_per_second"] / (2 * config().batch_tokens))
    expected = f"step 10/20  straggler: {named} 1.50 times as slow as the median rank; a step has 0.200 s of forwards "
    assert [line for line in capsys.readouterr().out.splitlines() if "straggler" in line] == [
        f"{expected}and 0.100 s of waits for data"
    ]


def test_a_resumed_run_drops_every_row_after_its_checkpoint():
    metrics = Metrics(config(), Progress(0, 0), 1, CPU)
    for step in range(1, 10):
        metrics.step(step, values(3.0, 1e-3, 0.5), FLOPS)
    for step in (4, 8):
        metrics.validation(validation_row(step))
        metrics.evaluation(evaluation_row(step))
        metrics.event(step, "saved")
    metrics.event(7, "skipped", why="loss is inf", samples=[24, 27])
    metrics.close()
    before = rows("metrics")
    with (FOLDER / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "lo')

    metrics = Metrics(config(), Progress(5, 5), 2, CPU)
    metrics.step(6, values(2.0, 1e-3, 0.5), FLOPS)
    metrics.close()
    assert rows("metrics")[:5] == before[:5]
    assert [row["step"] for row in rows("metrics")] == [1, 2, 3, 4, 5, 6]
    assert rows("metrics")[5]["seconds"] > before[4]["seconds"]
    assert rows("validation") == [validation_row(4)]
    assert rows("evaluations") == [evaluation_row(4)]
    events = [(row["step"], row["event"], row.get("ranks")) for row in rows("events")]
    assert events == [(0, "started", 1), (4, "saved", None), (5, "resumed", 2)]


def test_a_branch_with_other_data_counts_the_samples_of_that_data():
    trunk = recorded(config())
    progress = Progress(5, 5, stages=(trunk, replace(trunk, first_step=3, seq_len=16)))
    metrics = Metrics(config(), progress, 1, CPU, branch={"folder": "runs/trunk/checkpoints/step_00000003"})
    metrics.skipped(6, "loss is inf")
    metrics.close()
    branched, skipped = rows("events")
    assert (branched["step"], branched["event"]) == (5, "branched")
    assert branched["folder"] == "runs/trunk/checkpoints/step_00000003"
    assert (skipped["step"], skipped["samples"]) == (6, [8, 11])  # batch 2 of 4 samples


def test_what_is_not_finite_is_null_in_json():
    metrics = Metrics(config(), Progress(0, 0), 1, CPU)
    metrics.step(1, values(float("inf"), 1e-3, float("nan")), FLOPS)
    metrics.validation(validation_row(1) | {"loss": float("nan"), "loss_by_position": [float("nan")]})
    metrics.close()
    assert (rows("metrics")[0]["loss"], rows("metrics")[0]["grad_norm"]) == (None, None)
    assert (rows("validation")[0]["loss"], rows("validation")[0]["loss_by_position"]) == (None, [None])
