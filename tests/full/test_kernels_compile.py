"""Registers and instructions of kernels on a Hopper GPU.

Most need half a minute of a core. Causal TSSA at the recommended shape and the bfloat16 loss are default tests.
"""

import pytest
from test_cross_entropy_triton import check_loss_kernels
from test_triton_compiles import check_kernels, compile_kernels

CALLS = ("bfloat16 12 64 bias 0 100,130", "float32 5 80 none 1024 100,130")


@pytest.mark.parametrize("call", CALLS)
def test_kernels_of_any_size_compile_and_stay_in_registers(call: str):
    check_kernels(compile_kernels(call))


def test_the_kernel_of_the_float32_loss_stays_in_registers():
    check_loss_kernels("float32")
