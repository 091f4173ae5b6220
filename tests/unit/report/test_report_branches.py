"""A run's report shows the run with its branches."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tost_lm.page import Page
from tost_lm.report.record import RunRecord
from tost_lm.report.run import overview
from tost_lm.report.training import branches


def write_rows(path: Path, *rows: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def add_branch(run_folder: Path):
    """Copies the run of 100 steps as a branch from a step, which trained up to `last`."""

    def add(name: str, step: int, last: int, trunk: str = "run", **measured: float) -> Path:
        folder = run_folder.with_name(name)
        shutil.copytree(run_folder, folder)
        config = folder / "config.toml"
        settings = f'[optim]\nschedule = "wsd"\ndecay_steps = {last - step}\n'
        config.write_text(config.read_text().replace("steps = 100", f"steps = {last}") + settings)
        origin = {"folder": f"runs/{trunk}/checkpoints/step_{step:08d}", "data": "continued", "manifest_sha256": ""}
        write_rows(folder / "events.jsonl", {"step": step, "event": "branched", **origin})
        rows = [
            {"step": at, "loss": 3.0, "tokens": at * 32, "seconds": (at - step) / 8}
            for at in range(step + 5, last + 1, 5)
        ]
        write_rows(folder / "metrics.jsonl", *rows)
        return folder

    return add


def test_a_run_without_branches_has_no_section(run_folder: Path, add_branch):
    add_branch("of_another_run", 50, 60, trunk="runner")
    assert branches(RunRecord.read(run_folder), Page("", figures="f")) == ""


def test_branches_are_listed_by_step_with_their_losses(run_folder: Path, add_branch):
    add_branch("late", 80, 90)
    early = add_branch("early", 50, 60)
    page = Page("", figures="f")
    text = branches(RunRecord.read(run_folder), page)
    data = json.loads(json.dumps(RunRecord.read(run_folder).config["data"]["folder"])).replace("_", r"\_")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    assert rows[2:] == [
        ["run", "–", "100 of 100", "cosine", data, "4.0000", "–"],
        ["early", "50", "60 of 60", "wsd, the last 10 steps decay", f"{data}, continued", "3.0000", "–"],
        ["late", "80", "90 of 90", "wsd, the last 10 steps decay", f"{data}, continued", "3.0000", "–"],
    ]
    header, *lines = csv.reader(page.charts["f/branches"].table().splitlines())
    assert header == ["step", *(f"{name}: mean (nats/token)" for name in ("run", "early", "late"))]
    assert [line for line in lines if line[0] == "60"] == [["60", "4.8", "3.0", ""]]

    assert branches(RunRecord.read(early), Page("", figures="f")) == ""
    text = overview(RunRecord.read(early))
    assert r"| branch of | runs/run/checkpoints/step\_00000050, data continued |" in text
    assert "| mean throughput | 256 tokens/s |" in text  # 10 steps of 32 tokens in 1.25 s
