"""Training sections of a run's report: figures with their data, metrics, events."""

import csv
import json
from dataclasses import replace
from typing import Any

import pytest
from stage_records import progress

from tost_lm.checkpointing.run_folder import read_record
from tost_lm.errors import ConfigError
from tost_lm.files import write_rows
from tost_lm.page import Chart, Page
from tost_lm.report.record import RunRecord
from tost_lm.report.run import metrics
from tost_lm.report.training import events, losses, positions


def measurement(step: int, *by_position: float | None) -> dict[str, Any]:
    ends = [8 * 2**i for i in range(len(by_position))]
    return {
        "step": step, "loss": by_position[0], "position_ends": ends, "loss_by_position": by_position, "tokens": 128,
    }  # fmt: skip


def numbers(chart: Chart) -> list[list[str]]:
    return list(csv.reader(chart.table().splitlines()))


def test_the_loss_figure_has_training_and_validation_by_step(run_folder):
    write_rows(run_folder / "validation.jsonl", [measurement(50, 5.5), measurement(100, 4.25)])
    page, (stage,) = Page("", figures="f"), progress(100, 2, 16).stages
    stages = (stage, replace(stage, name="longer", first_step=50))
    assert "](f/loss.png)" in losses(RunRecord.read(run_folder), page, stages)
    assert [text.get_text() for text in page.charts["f/loss"].drawing.axes[0].texts] == ["longer"]
    header, *rows = numbers(page.charts["f/loss"])
    assert header == ["step", "training: mean (nats/token)", "validation: mean (nats/token)"]
    assert [(int(row[0]), float(row[1])) for row in rows] == [(step, 6 - step / 50) for step in range(10, 101, 10)]
    assert [row[2] for row in rows] == ["", "", "", "", "5.5", "", "", "", "", "4.25"]


def test_losses_by_position_are_those_of_the_last_measurement_and_earlier_ones(run_folder):
    write_rows(run_folder / "validation.jsonl", [measurement(step, 6 - step / 10, 5.0) for step in range(1, 8)])
    page = Page("", figures="f")
    text = positions(RunRecord.read(run_folder), page)
    assert "| step 1 | 5.900 | 5.000 |\n| step 3 | 5.700 | 5.000 |\n| step 5 | 5.500 |" in text
    assert "| step 7 | 5.300 | 5.000 |" in text
    assert numbers(page.charts["f/position"])[1:] == [["8", "5.9", "5.7", "5.5", "5.3"], ["16", *["5.0"] * 4]]


def test_sections_without_data_are_empty(run_folder):
    (run_folder / "metrics.jsonl").unlink()
    run, page = RunRecord.read(run_folder), Page("", figures="f")
    assert [losses(run, page, ()), positions(run, page), metrics(run), events(run)] == [""] * 4
    assert not page.charts


def test_the_newest_launch_stands_beside_its_plan(run_folder):
    assert "tost plan" not in metrics(RunRecord.read(run_folder))
    planned = {"memory_peak_bytes": 2.25e9, "tokens_per_second": 400.0}
    (run_folder / "env.json").write_text(json.dumps({"planned": planned}))
    text = metrics(RunRecord.read(run_folder))
    assert "| peak memory of a rank (GB) | 2.50 | 2.25 |\n| tokens/s | 320 | 400 |" in text
    write_rows(run_folder / "events.jsonl", [{"step": 100, "event": "resumed", "time": "…", "ranks": 2}])
    assert "tost plan" not in metrics(RunRecord.read(run_folder))  # nothing is measured yet


def test_events_have_reasons_and_samples(run_folder):
    rows = [
        {"step": 0, "event": "started", "time": "2026-01-01T00:00:00+0000", "ranks": 2},
        {"step": 30, "event": "skipped", "time": "…", "why": "loss is nan", "samples": [58, 59]},
        {"step": 50, "event": "stopped", "time": "…", "why": "SIGTERM"},
        {"step": 50, "event": "resumed", "time": "…", "ranks": 4},
    ]
    write_rows(run_folder / "events.jsonl", rows)
    text = events(RunRecord.read(run_folder))
    assert "skipped step: 1, resumed: 1, stopped early: 1." in text
    assert "| 30 | skipped step | loss is nan; samples 58–59 |" in text
    assert "| 50 | stopped early | SIGTERM |\n| 50 | resumed | ranks 4 |" in text
    assert "started" not in text


@pytest.mark.parametrize(
    ("file", "row", "missing"),
    [("events", {"step": 3}, "event"), ("events", 3, "step"), ("metrics", {"step": 3, "loss": 4.0}, "tokens")],
)
def test_a_damaged_row_is_one_line(run_folder, file, row, missing):
    path = run_folder / f"{file}.jsonl"
    valid = {"step": 2, "event": "skipped", "loss": 4.0, "tokens": 9, "seconds": 1.0}
    path.write_text(f"{json.dumps(valid)}\n{json.dumps(row)}\n")
    with pytest.raises(ConfigError) as error:
        read_record(path)
    assert str(error.value) == f"{path}, line 2: damaged: has no {missing}; correct or remove the line"


def test_figures_accept_nan_and_infinity(run_folder, recwarn):
    values = [(1, 5.0), (2, None), (3, float("inf")), (4, 1e30), (5, float("nan"))]
    rows = [{"step": step, "loss": loss} for step, loss in values]
    validation = [measurement(2, None)]
    run, page = replace(RunRecord.read(run_folder), metrics=rows, validation=validation), Page("", figures="f")
    assert losses(run, page, ())
    assert positions(run, page)
    lines = [",".join(row) for row in numbers(page.charts["f/loss"])[1:]]
    assert lines == ["1,5.0,", "2,nan,nan", "3,inf,", "4,1e+30,", "5,nan,"]
    for chart in page.charts.values():
        assert chart.picture().startswith(b"\x89PNG")
    assert not recwarn.list
