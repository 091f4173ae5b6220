"""Causal TSSA in Triton, for NVIDIA GPUs: the phases for float32, bfloat16 and float16, with float32 statistics.

A program computes some heads of a chunk of 32 tokens. A thread holds four channels, in (b′) and (a′) two, and reads one
token after another: sums over tokens are running sums in its registers. (b′) and (a′) also need sums from each token to
the last. They go through steps of eight tokens from the end of the chunk, forward and then backward in each. Where all
chunks are full, loads have no masks. No kernel is tuned or compiled for a length, but the scan takes wider steps if a
document has more than 128 chunks.

The two phases with the softmax over heads run one program for all heads of a chunk. It loops over groups of heads
twice and reads w from the cache the second time. With fewer than 1024 chunks this would leave a large GPU partly idle.
In that case, and where the caller gives a softmax, each group has its own program, and one kernel runs before and one
after the softmax. They read w once more, usually from the L2 cache.

For each token and channel, a thread executes 31 instructions forward and 108 backward, scans not included (bfloat16, 12
heads of 64 channels, sm_90: `pytest -s tests/unit/mixers/tssa/test_triton_compiles.py`).

Device memory traffic of each token, with C = H·D channels of e bytes. A chunk's float32 sums are C/8 bytes a token
for each read or write, scans included. The caller's additions of carries are not included.

    phase                     w, dy, y, dw     chunk sums     Π, dz
    (a)  energy               1 · eC           3 · C/8        –
    (b)  memberships          1 · eC           4 · C/8        4H
    (c)  output               2 · eC           1 · C/8        4H
    (c′) output               2 · eC           4 · C/8        4H
    (b′) memberships          2 · eC           6 · C/8        8H
    (a′) energy               3 · eC           4 · C/8        8H

In bfloat16 that is 9C + 8H bytes forward and 15.75C + 20H backward.
"""

from tost_lm.mixers.tssa.triton.backward import energy_backward, memberships_backward, output_backward
from tost_lm.mixers.tssa.triton.common import chunk_tokens
from tost_lm.mixers.tssa.triton.forward import energy, memberships, output

__all__ = [
    "chunk_tokens",
    "energy",
    "energy_backward",
    "memberships",
    "memberships_backward",
    "output",
    "output_backward",
]
