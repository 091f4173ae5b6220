"""Causal TSSA in Triton, for NVIDIA GPUs: the phases for float32, bfloat16 and float16, with float32 statistics.

A program computes a chunk of 32 tokens, one head at a time. One thread holds the 32 tokens of a channel in registers,
so sums over tokens, forward or backward in time, are plain additions. No kernel is tuned or compiled for a length.

The two phases with the softmax over heads run one program for all heads of a chunk. It loops over the heads twice and
reads w from the cache the second time. With fewer than 1024 chunks this would leave a large GPU partly idle. In that
case, and where the caller gives a softmax, each head has its own program, and one kernel runs before and one after the
softmax. They read w once more, usually from the L2 cache. (a′) also reads w of the next token from the cache.

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

from tost_lm.ops.triton.backward import energy_backward, memberships_backward, output_backward
from tost_lm.ops.triton.forward import energy, memberships, output
from tost_lm.ops.triton.tiles import chunk_tokens

__all__ = [
    "chunk_tokens",
    "energy",
    "energy_backward",
    "memberships",
    "memberships_backward",
    "output",
    "output_backward",
]
