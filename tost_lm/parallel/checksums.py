"""Memory that changes by itself, found by sums over the bits of weights and optimizer state.

Replicas (ZeRO stage 0) are compared between ranks. Partitions (stages 1 to 3) have no second copy, and what changes in
one goes to all ranks with the next update: so each rank sums its own after an update and again before the next.
"""

import socket
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from tost_lm.errors import CorruptionError
from tost_lm.parallel.agreement import error_of_all_ranks, gather, name_ranks
from tost_lm.parallel.zero import own_state

WHAT_TO_DO = "the run goes on from its newest checkpoint with the same command; test that machine's memory"
SHOWN = 3  # tensors in a message

Sums = Mapping[str, int]


class Checksums:
    """Watches over what an engine's optimizer works on; all ranks build it, after `zero.restore`.

    Any one flipped bit is found for certain. A rank that has no replica at stage 0 sums its own, as in stages 1 to 3.

    Args:
        every: steps between comparisons of replicas; 0 turns this off, and the sums of stages 1 to 3, too.
    """

    def __init__(self, engine: Any, every: int) -> None:
        self._engine, self._every = engine, every
        self._has_replicas = engine.zero_optimization_stage() == 0 and engine.mesh.replicas.size > 1
        self._expected: Sums = {}
        self._expect_these()

    def before_update(self) -> None:
        """In each step, right before the update. Raises CorruptionError on the rank whose memory it is."""
        if not self._has_replicas:
            self.check()

    def after_update(self, step: int) -> None:
        """When `step` steps are done, the last of them maybe skipped.

        Raises:
            CorruptionError: on all ranks alike, where replicas differ.
        """
        self._expect_these()
        if self._has_replicas and self._every and step % self._every == 0:
            self.check()

    def check(self) -> None:
        """Look now, on all ranks: after a checkpoint's copy was taken, say, so that it cannot hold what is damaged.

        Raises:
            CorruptionError: on all ranks alike, where replicas differ; else on the rank whose memory it is.
        """
        if not self._every:
            return
        if self._has_replicas:
            _compare(self._sums(), self._engine.mesh.tensor.rank)
            return
        now = self._sums()
        changed = [what for what, expected in self._expected.items() if now[what] != expected]
        if changed:
            here = f"rank {dist.get_rank()} ({socket.gethostname()})"
            raise CorruptionError(f"{_finding(here, changed)}: {WHAT_TO_DO}")

    def _expect_these(self) -> None:
        if self._every and not self._has_replicas:
            self._expected = self._sums()

    def _sums(self) -> Sums:
        names, tensors = zip(*own_state(self._engine), strict=True)
        return dict(zip(names, torch.stack([bit_sum(x) for x in tensors]).tolist(), strict=True))  # one wait for a GPU


def bit_sum(x: Tensor) -> Tensor:
    """The sum of x's memory as 64-bit words, modulo 2⁶⁴, [] int64: one pass, and a flipped bit is ± a power of 2."""
    octets = x.contiguous().view(-1).view(torch.uint8)
    start = -octets.storage_offset() % 8
    words = (len(octets) - start) // 8
    if words <= 0:
        return octets.sum()
    end = start + 8 * words
    total = octets[start:end].view(torch.int64).sum()
    return total if 8 * words == len(octets) else total + octets[:start].sum() + octets[end:].sum()


def _compare(sums: Sums, tensor_rank: int) -> None:
    """Raise CorruptionError on all ranks unless those of the same tensor rank have the same sums."""
    digest = xxhash.xxh3_128_hexdigest(repr(sums).encode())
    told = [(tensor_rank, digest) for tensor_rank, digest in gather((tensor_rank, digest))]
    if len(set(told)) == len({tensor_rank for tensor_rank, _ in told}):
        return
    hosts, tensor_ranks, sums_of_ranks = zip(*gather((socket.gethostname(), tensor_rank, sums)), strict=True)
    findings = []
    for place in sorted(set(tensor_ranks)):
        replicas = {rank: sums_of_ranks[rank] for rank, other in enumerate(tensor_ranks) if other == place}
        findings += _findings(replicas, hosts)
    raise error_of_all_ranks([f"{'; '.join(findings)}: {WHAT_TO_DO}"], CorruptionError)


def _findings(replicas: Mapping[int, Sums], hosts: Sequence[str]) -> list[str]:
    """Which of the ranks that should have the same sums differ from most of them, and in what."""
    differing: dict[str, list[str]] = defaultdict(list)
    for what in next(iter(replicas.values())):
        [(usual, count)] = Counter(sums[what] for sums in replicas.values()).most_common(1)
        if 2 * count > len(replicas):
            who = name_ranks([rank for rank, sums in replicas.items() if sums[what] != usual], hosts)
        else:
            who = f"one of {name_ranks([*replicas], hosts)}, it cannot be told which"
        if count < len(replicas):
            differing[who].append(what)
    return [_finding(who, whats) for who, whats in differing.items()]


def _finding(who: str, whats: Sequence[str]) -> str:
    more = f" and {len(whats) - SHOWN} tensors more" if len(whats) > SHOWN else ""
    return f"memory changed by itself on {who}, in {', '.join(whats[:SHOWN])}{more}"
