"""Compile every kernel for an H100, without one, as a call of the backend would.

`python compile_for_hopper.py DTYPE H D BIAS FEW_CHUNKS ENDS`, with comma-separated ends of documents, and for the
loss `python compile_for_hopper.py loss DTYPE V` print a JSON list: what ptxas reports of each kernel. Where all chunks
are full, it has the instructions that a thread executes for a token and channel.
"""

import json
import re
import subprocess
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tost_lm.mixers.tssa import triton as phases
from tost_lm.mixers.tssa.phases import Inputs, Stored
from tost_lm.mixers.tssa.triton import common
from tost_lm.ops import cross_entropy_triton
from tost_lm.ops.layout import document_layout

kernels = []
run = JITFunction.run


def compile_only(kernel, *args, grid, warmup, **options):
    compiled: Any = run(kernel, *args, grid=grid, warmup=True, **options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        printed = lambda *command: subprocess.run([*command, file.name], capture_output=True, text=True).stdout
        usage = dict(re.findall(r"(\w+):(\d+)", printed(knobs.nvidia.cuobjdump.path, "--dump-resource-usage")))
        code = printed(knobs.nvidia.nvdisasm.path, "-c")
    instructions = None
    if options.get("FULL"):
        groups, tokens = options.get("GROUPS", 1), common.TOKENS.value
        channels = options["G_"] * options["D_"] * groups / (32 * options["num_warps"])
        instructions = executed_instructions(code, tokens // common.STEP.value, groups) / tokens / channels
    kernels.append(
        {
            "kernel": kernel.__name__,
            "stage": options.get("STAGE", ""),
            "warps": compiled.metadata.num_warps,
            "registers": int(usage["REG"]),
            "spilled_bytes": int(usage["STACK"]) + int(usage["LOCAL"]),
            "shared_bytes": compiled.metadata.shared,
            "shuffles": compiled.asm["ptx"].count("shfl."),
            "instructions": instructions,
        }
    )


def executed_instructions(code: str, steps: int, groups: int) -> int:
    """The instructions of a warp: a loop around others runs `groups` times, one without others `steps` times."""
    places, count, loops = {}, 0, []
    for line in code.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line.strip()):
            places[label[1]] = count
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*);", line):
            count += not instruction[1].startswith("NOP")
            target = re.search(r"BRA `\((\.L_x_\d+)\)", instruction[1])
            # The last line of a kernel is an endless loop of one instruction, which is not reached.
            if target and places.get(target[1], count) < count - 1:
                loops.append(range(places[target[1]], count))
    times = [1] * count
    for loop in loops:
        has_loops = any(other != loop and set(other) <= set(loop) for other in loops)
        for place in loop:
            times[place] *= groups if has_loops else steps
    return sum(times)


def call_every_phase(dtype: torch.dtype, H: int, D: int, has_bias: bool, ends: list[int]) -> None:
    cpu = torch.device("cpu")
    layout = document_layout((0, *ends), phases.chunk_tokens(H, D, cpu), cpu)
    M, K = layout.offsets[-1], len(layout.start_K)
    w, sums_KHD, sums_KH, pi_MH = torch.zeros(M, H, D, dtype=dtype), *map(torch.zeros, ((K, H, D), (K, H), (M, H)))
    bias_BHT = torch.zeros(1, H, M, dtype=dtype) if has_bias else None
    inputs = Inputs(w, layout, torch.zeros(H, dtype=dtype), bias_BHT)
    stored = Stored(pi_MH, sums_KHD, sums_KHD, sums_KH)
    phases.energy(inputs)
    long = document_layout((0, (common.NARROW[0] + 1) * common.TOKENS.value), common.TOKENS.value, cpu)
    common.sums(torch.zeros(len(long.start_K), H, D), long)
    phases.memberships(inputs, sums_KHD)
    phases.output(inputs, stored)
    phases.output_backward(w, inputs, stored)
    phases.memberships_backward(w, inputs, stored, sums_KHD, sums_KH)
    phases.energy_backward(w, inputs, stored, pi_MH, sums_KHD, sums_KHD)


def call_loss(dtype: torch.dtype, V: int) -> None:
    logits_mV, row_m, log_sum_m = torch.zeros(2, V, dtype=dtype), torch.zeros(2, dtype=torch.int64), torch.zeros(2)
    cross_entropy_triton.log_sums(logits_mV, row_m)
    cross_entropy_triton.gradient_(logits_mV, row_m, row_m > 0, log_sum_m, 1e-4)
    cross_entropy_triton.log_sums_and_gradient_(logits_mV, row_m, row_m > 0, 1e-4)


if __name__ == "__main__":
    hopper = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    driver.set_active(hopper)  # pyright: ignore[reportArgumentType]
    JITFunction.run = compile_only  # pyright: ignore[reportAttributeAccessIssue]
    if sys.argv[1] == "loss":
        call_loss(getattr(torch, sys.argv[2]), int(sys.argv[3]))
    else:
        dtype, H, D, bias, few_chunks, ends = sys.argv[1:]
        common.FEW_CHUNKS = int(few_chunks)
        call_every_phase(getattr(torch, dtype), int(H), int(D), bias == "bias", [int(end) for end in ends.split(",")])
    print(json.dumps([kernel for i, kernel in enumerate(kernels) if kernel not in kernels[:i]]))
