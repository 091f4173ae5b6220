"""Registers and instructions of kernels on a Hopper GPU.

Most need half a minute of a core. Causal TSSA at the recommended shape and the bfloat16 loss are default tests.
"""

import pytest
from test_cross_entropy_triton import check_loss_kernels
from test_triton_compiles import check_kernels, compile_kernels

CALLS = ("bfloat16 12 64 energy-share 0 100,130", "float32 5 80 energy-mean 1024 100,130")


@pytest.mark.parametrize("call", CALLS)
def test_kernels_of_any_size_compile_and_stay_in_registers(call: str):
    check_kernels(compile_kernels(call))


def check_slot_kernels(kernels: list[dict], registers: int) -> None:
    """`pytest -s` shows registers, shared memory and instructions."""
    for kernel in kernels:
        print(*(f"{name}={value}" for name, value in kernel.items()))
    assert len({kernel["kernel"] for kernel in kernels}) == 6
    assert max(kernel["spilled_bytes"] for kernel in kernels) == 0
    assert max(kernel["registers"] for kernel in kernels) <= registers


def test_slot_kernels_of_any_size_compile_and_stay_in_registers():
    check_slot_kernels(compile_kernels("slots float32 3 64 256 100,130"), 255)


def test_few_instructions_are_executed_for_each_token():
    """At most half of 394 in the forward pass, and 60 % of 971 in the backward pass, the scans not included. Kernels
    with products of matrices executed those."""
    kernels = compile_kernels("slots bfloat16 12 16 28 64,192")
    check_slot_kernels(kernels, 128)
    executed = {kernel["kernel"]: kernel["instructions"] for kernel in reversed(kernels)}  # first those with reads
    assert executed["sums_kernel"] + executed["read_kernel"] <= 394 / 2
    assert executed["read_backward_kernel"] + executed["write_backward_kernel"] <= 0.6 * 971


def test_the_kernel_of_the_float32_loss_stays_in_registers():
    check_loss_kernels("float32")
