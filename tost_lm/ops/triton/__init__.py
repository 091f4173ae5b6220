"""Causal TSSA in Triton, for NVIDIA GPUs: the phases for float32, bfloat16 and float16, with float32 statistics.

A program takes a chunk of 32 tokens, one head at a time: 32 tokens of one channel are the registers of one thread, so
that sums over tokens, either way in time, are plain additions. No kernel is tuned or compiled for a length.

The two phases with the softmax over heads have one program for all heads of a chunk, which walks over them twice and
finds w in the cache the second time. Calls of fewer than 1024 chunks would leave a large GPU idle that way: there, and
where a softmax is handed in, each head has its program and two kernels run around the softmax, so that w is read once
more, as a rule from the L2 cache. (a′) reads w again from the cache, one token on.

Device memory moved for each token, with C = H·D channels of e bytes. Each chunk's sums in float32 are C/8 bytes a token
each time they are read or written, scans included; what the caller does to add carries comes on top.

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
