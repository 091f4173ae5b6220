"""The tests of what uses private names of torch and DeepSpeed, and of public models, with the newest libraries."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
TESTS = {
    "torch deepspeed": (
        "tests/unit/data/test_prefetch.py", "tests/unit/model/test_compilation.py", "tests/unit/testing",
        "tests/multiprocess/test_watchdog.py", "tests/multiprocess/test_flight_recorder.py",
        "tests/multiprocess/test_deepspeed.py", "tests/multiprocess/test_traffic.py", "tests/multiprocess/test_zero.py",
    ),
    "transformers": ("tests/unit/interop", "tests/programs/test_convert.py"),
}  # fmt: skip
"""By the libraries."""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("libraries", TESTS)
def test_the_newest_versions(libraries: str, pytestconfig: pytest.Config, tmp_path: Path):
    if not pytestconfig.getoption("--full"):
        pytest.skip("it installs other libraries: pytest --full")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--no-compile"]
    installed = subprocess.run([*pip, "--target", str(tmp_path), *libraries.split()], capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"{libraries} cannot be installed: {installed.stderr.strip().splitlines()[-1]}")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{CHECKOUT}"}
    versions = f"from importlib.metadata import version; print(*((x, version(x)) for x in {libraries.split()}))"
    for command in (["-c", versions], ["-m", "pytest", "-q", "-W", "ignore", *TESTS[libraries]]):
        run = subprocess.run([sys.executable, *command], cwd=CHECKOUT, env=environment, capture_output=True, text=True)
        print(run.stdout)
        assert run.returncode == 0, run.stdout + run.stderr
