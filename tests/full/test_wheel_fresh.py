"""A wheel that is installed, with what it asks for, into a new environment: it loads, scores and generates there."""

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


@pytest.mark.timeout(1800)
def test_a_fresh_environment_loads_scores_and_generates(pytestconfig: pytest.Config, tmp_path: Path):
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
    shutil.rmtree(tmp_path / "fresh")  # a gigabyte, which pytest would keep
