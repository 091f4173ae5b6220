"""The tests of everything that uses private names of torch and DeepSpeed, with the newest versions of both."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
TESTS = (
    "tests/unit/data/test_prefetch.py", "tests/unit/model/test_compilation.py", "tests/unit/testing",
    "tests/multiprocess/test_watchdog.py", "tests/multiprocess/test_flight_recorder.py",
    "tests/multiprocess/test_zero.py", "tests/multiprocess/test_traffic.py",
)  # fmt: skip


@pytest.mark.timeout(3600)
def test_private_names_under_the_newest_torch_and_deepspeed(pytestconfig: pytest.Config, tmp_path: Path):
    if not pytestconfig.getoption("--full"):
        pytest.skip("it installs another torch and DeepSpeed: pytest --full")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--no-compile"]
    installed = subprocess.run([*pip, "--target", str(tmp_path), "torch", "deepspeed"], capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"torch cannot be installed: {installed.stderr.strip().splitlines()[-1]}")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{CHECKOUT}"}
    versions = "import deepspeed, torch; print('torch', torch.__version__, 'deepspeed', deepspeed.__version__)"
    for command in (["-c", versions], ["-m", "pytest", "-q", "-W", "ignore", *TESTS]):
        run = subprocess.run([sys.executable, *command], cwd=CHECKOUT, env=environment, capture_output=True, text=True)
        print(run.stdout)
        assert run.returncode == 0, run.stdout + run.stderr
