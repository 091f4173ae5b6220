"""Sizes that the code and the resource plan of a run share. This module does not import torch."""

from collections.abc import Callable, Iterable
from math import isqrt
from typing import TypeVar

Item = TypeVar("Item")

LOGITS_BYTES = 1 << 28
"""Bytes of logits that the loss holds at once on a CPU, at most."""

DEVICE_LOGITS_BYTES = 1 << 30
"""The same on other devices: so many that adding up the gradients of the head's weight costs little. A fixed number, so
that the order of sums, and every bit of a resumed run, does not depend on the memory that is free."""

CPU_CHUNK_ELEMENTS = 1 << 19
"""Elements of w in a chunk of the operator on a CPU: enough to hide the overhead of calls, few enough for the cache."""

DEVICE_CHUNK_ELEMENTS = 1 << 22
"""Elements of w in a chunk on other devices, without Triton."""

TRITON_CHUNK_TOKENS = 32
"""Tokens of a chunk in the Triton kernels: those of one channel fit the registers of one thread."""

ALL_GATHER_RANKS = 16
"""Up to so many sequence ranks, one all-gather of statistics: its bytes cost less time than the call of a second
collective."""

BUCKET_ELEMENTS = 40_000_000
"""Gradients that are reduced at once, as in Megatron-LM: few enough that most are reduced during the backward."""

CAST_ELEMENTS = 1 << 24
"""Gradients that are cast at once: from bfloat16 when they are added to float32 sums, and to float64 for their norm."""


def rank_groups(ranks: int) -> tuple[range, ...]:
    """About √ranks groups of neighbours among more than ALL_GATHER_RANKS sequence ranks, which gather at two levels."""
    size = isqrt(ranks - 1) + 1
    return tuple(range(first, min(first + size, ranks)) for first in range(0, ranks, size))


def rows_of_groups(ranks: int) -> float:
    """Rows that a rank receives at both levels, on average."""
    sizes = [len(group) for group in rank_groups(ranks)]
    return sum(size * (size - 1) for size in sizes) / ranks + len(sizes) - 1


def buckets(items: Iterable[Item], size: Callable[[Item], int], least: int) -> list[list[Item]]:
    """Consecutive items that together have at least so many elements, but for the last ones."""
    found: list[list[Item]] = []
    elements = least
    for item in items:
        if elements >= least:
            found, elements = [*found, []], 0
        found[-1].append(item)
        elements += size(item)
    return found
