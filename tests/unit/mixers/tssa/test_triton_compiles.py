"""The kernels of causal TSSA compile for an H100. It needs no GPU: Triton has the assembler."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


CALLS = ("bfloat16 12 64 bias 0 100,130", "float32 5 80 none 1024 100,130")


def compile_kernels(call: str, **environment: str) -> list[dict]:
    """The kernels of a call, compiled in its own process, because this one may interpret kernels."""
    program = str(Path(__file__).with_name("compile_for_hopper.py"))
    ours = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, program, *call.split()], env={**ours, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_kernels(kernels: list[dict]) -> None:
    """`pytest -s` shows registers, shared memory and instructions."""
    for kernel in kernels:
        print(*(f"{name}={value}" for name, value in kernel.items()))
    assert len({kernel["kernel"] for kernel in kernels}) == 7
    assert max(kernel["spilled_bytes"] for kernel in kernels) == 0
    assert max(kernel["registers"] for kernel in kernels) <= 144
    assert max(kernel["shared_bytes"] for kernel in kernels) <= 48 * 1024
    # A thread holds channels, one token after another: a sum over tokens needs no other thread.
    assert [kernel["shuffles"] for kernel in kernels if kernel["kernel"] == "energy_kernel"] == [0]


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_kernels_of_other_shapes_compile_and_stay_in_registers(call: str):
    check_kernels(compile_kernels(call))


@pytest.mark.slow
def test_few_instructions_are_executed_for_each_token_and_channel():
    """At most half of 82 in the forward pass, and 60 % of 208 in the backward pass. A thread that held 32 tokens of one
    channel, with divisions and masks, executed those. The scans are not included."""
    kernels = compile_kernels("bfloat16 12 64 bias 0 128,192")
    check_kernels(kernels)
    assert max(kernel["registers"] for kernel in kernels) <= 128
    executed = {True: 0.0, False: 0.0}
    for kernel in kernels:
        if kernel["kernel"] != "scan_kernel":
            executed["backward" in kernel["kernel"]] += kernel["instructions"]
    assert executed[False] <= 82 / 2
    assert executed[True] <= 0.6 * 208
