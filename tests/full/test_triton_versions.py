"""The kernels under the other supported version of Triton, which chooses layouts by other rules."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from test_triton_compiles import CALLS, check_kernels, compile_kernels


@pytest.mark.timeout(1800)
def test_kernels_compile_alike_under_the_other_triton(pytestconfig: pytest.Config, tmp_path: Path):
    if not pytestconfig.getoption("--full"):
        pytest.skip("it installs another triton: pytest --full")
    other = "3.7.1" if version("triton").startswith("3.6.") else "3.6.0"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path)]
    installed = subprocess.run([*pip, f"triton=={other}"], capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"triton {other} cannot be installed: {installed.stderr.strip().splitlines()[-1]}")
    for call in CALLS:
        check_kernels(compile_kernels(call, PYTHONPATH=str(tmp_path)))
