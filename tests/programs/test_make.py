"""`make test-rest` runs every part also after others failed, with a stand-in for pytest."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from forked import CHECKOUT

PYTHON = """#!/bin/sh
echo "$*" >> ran
case "$*" in *tests/multiprocess*|*tests/programs*) exit {code};; esac
"""


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("code", [0, 1])
def test_every_part_runs_and_those_that_failed_are_named(code: int, tmp_path: Path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).symlink_to(CHECKOUT / name)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/complete").touch()  # the environment is up to date
    (tmp_path / ".venv/bin/python").write_text(PYTHON.format(code=code))
    (tmp_path / ".venv/bin/python").chmod(0o755)
    # An outer make hands its variables down in MAKEFLAGS.
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "PYTEST")}
    done = subprocess.run(["make", "test-rest"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    tiers = [line.split()[3] for line in (tmp_path / "ran").read_text().splitlines()]
    assert tiers == ["tests/golden", "tests/faults", "tests/programs"]
    assert (done.returncode != 0) == (code != 0)
    assert ("failed: tests/golden tests/programs\n" in done.stdout) == (code != 0), done.stdout
