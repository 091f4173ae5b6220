"""Every kernel compiles for an H100 and keeps its tiles in registers. It needs no GPU: Triton has the assembler."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize("arguments", ["bfloat16 12 64 energy-share 0", "float32 5 80 energy-mean 1024"])
def test_kernels_compile_and_stay_in_registers(arguments: str):
    """In its own process, because this one may interpret kernels. `-s` shows registers and shared memory."""
    program = str(Path(__file__).with_name("compile_for_hopper.py"))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, program, *arguments.split()], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)
    for kernel in kernels:
        print(arguments, *(f"{name}={value}" for name, value in kernel.items()))
    assert len({kernel["kernel"] for kernel in kernels}) == 7
    assert max(kernel["spilled_bytes"] for kernel in kernels) <= 64
    assert max(kernel["shared_bytes"] for kernel in kernels) <= 48 * 1024
