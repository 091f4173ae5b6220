"""A wheel that is installed, with what it asks for, into a new environment, and used there outside a checkout."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked import CHECKOUT
from test_wheel import ALONE, SCORE, check_generation, start, write_model

from tost_lm.testing import FLOAT32_REORDERED, assert_close

SOURCES = ("pyproject.toml", "README.md", "LICENSE", "tost_lm")


@pytest.mark.timeout(3600)
def test_a_fresh_environment_runs_everything(pytestconfig: pytest.Config, tmp_path: Path):
    if not pytestconfig.getoption("--full"):
        pytest.skip("it installs torch: pytest --full")
    start(sys.executable, "-m", "venv", "fresh", cwd=tmp_path)
    python = tmp_path / "fresh/bin/python"
    pip = ["-m", "pip", "--disable-pip-version-check"]
    probe = [str(python), *pip, "download", "--no-deps", "--dest", "found", "setuptools>=77"]
    probed = subprocess.run(probe, cwd=tmp_path, env=ALONE, capture_output=True, text=True)
    if probed.returncode:
        pytest.skip(f"no package index: {probed.stderr.strip().splitlines()[-1]}")

    for name in SOURCES:  # a copy: builds leave files beside the sources
        copy = shutil.copytree if (CHECKOUT / name).is_dir() else shutil.copy
        (tmp_path / "tree").mkdir(exist_ok=True)
        copy(CHECKOUT / name, tmp_path / "tree" / name)
    start(python, *pip, "wheel", "--no-deps", "--wheel-dir", "built", "./tree", cwd=tmp_path)
    (wheel,) = (tmp_path / "built").iterdir()
    constraints = ("--constraint", CHECKOUT / "constraints.txt")
    start(python, *pip, "install", *constraints, wheel, cwd=tmp_path, limit_s=1500)
    start(python, *pip, "check", cwd=tmp_path)

    write_model(tmp_path / "export")
    place = start(python, "-c", SCORE, "export", "fresh.pt", cwd=tmp_path).strip()
    assert Path(place).is_relative_to(tmp_path / "fresh")
    start(sys.executable, "-c", SCORE, "export", "checkout.pt", cwd=tmp_path, PYTHONPATH=str(CHECKOUT))
    for ours, theirs in zip(*(torch.load(tmp_path / name) for name in ("fresh.pt", "checkout.pt")), strict=True):
        assert_close(ours, theirs, FLOAT32_REORDERED)  # torch may be another build
    check_generation(python, tmp_path / "export")

    start(python, *pip, "install", *constraints, f"{wheel}[train,report]", cwd=tmp_path, limit_s=1500)
    run_the_demo(tmp_path / "fresh/bin", tmp_path)
    shutil.rmtree(tmp_path / "fresh")  # gigabytes, which pytest would keep


def run_the_demo(commands: Path, cwd: Path) -> None:
    """The commands of `make demo`, with recipes by name and a small model."""
    tost = commands / "tost"
    assert start(tost, "--help", cwd=cwd).startswith("usage: tost COMMAND")
    assert "FLOP of the run" in start(tost, "plan", "demo", cwd=cwd)
    start(tost, "prepare", "tokenizer", "embedded", cwd=cwd)
    start(tost, "prepare", "shards", "embedded", cwd=cwd)
    small = ["train.steps=2", "validation.sequences=2", "model.pattern=D", "model.layers=1"]
    start(tost, "train", "demo", "launch.ranks=2", *small, "model.width=32", cwd=cwd)
    start(tost, "eval", "runs/demo", "heldout", cwd=cwd)
    assert start(tost, "generate", "runs/demo", "The lines", "sample.tokens=4", cwd=cwd).startswith("The lines")
    start(tost, "report", "runs/demo", cwd=cwd)
    assert (cwd / "runs/demo/report.html").is_file()
