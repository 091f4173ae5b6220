"""Detection of silent data corruption by checksums of weights and optimizer state.

At ZeRO stage 0 and with `parallel.shard_ranks`, ranks compare their copies. Other shards (stages 1 to 3) have no second
copy, and the next update sends a changed value to all ranks. So each rank sums its own after an update and again before
the next one.
"""

import socket
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from tost_lm.errors import CorruptionError
from tost_lm.parallel.agreement import all_gather_object, error_of_all_ranks, name_ranks
from tost_lm.parallel.engine import Engine

FIX = "test that machine's memory, and run the same command to resume from the newest checkpoint"
MAX_NAMED = 3  # tensors in a message

Sums = Mapping[str, int]


class Checksums:
    """Checks the state of an engine's optimizer; all ranks build it, after `Engine.set_state`.

    Any single bit of it that flips between two sums is detected; activations and gradients are not summed.

    Args:
        interval: steps between comparisons of copies; 0 turns all checks off, also those of state without a copy.
    """

    def __init__(self, engine: Engine, interval: int) -> None:
        self._engine, self._interval = engine, interval
        self._part = engine.replicated_part
        self._expected = torch.empty(0)
        self._record()

    def before_update(self) -> None:
        """Right before each update. Raises CorruptionError on the rank whose memory changed."""
        if self._part is None:
            self.check()

    def after_update(self, step: int) -> None:
        """After `step` steps, of which the last may have been skipped.

        Raises:
            CorruptionError: replicas differ; on all ranks.
        """
        self._record()
        if self._part is not None and self._interval and step % self._interval == 0:
            self.check()

    def check(self) -> None:
        """Check now; a collective call. After a checkpoint's copy it proves that the copy is undamaged.

        Raises:
            CorruptionError: on all ranks if replicas differ; otherwise on the rank whose memory changed.
        """
        if not self._interval:
            return
        names, sums = self._sums()
        if self._part is not None:
            part = f"tensor rank {self._engine.mesh.tensor.rank}, part {self._part}"
            _compare(dict(zip(names, sums.tolist(), strict=True)), part)
            return
        is_changed = (sums != self._expected).tolist()
        if changed := [name for name, differs in zip(names, is_changed, strict=True) if differs]:
            here = f"rank {dist.get_rank()} ({socket.gethostname()})"
            raise CorruptionError(f"{_corruption(here, changed)}; {FIX}")

    def _record(self) -> None:
        if self._interval and self._part is None:
            _, self._expected = self._sums()

    def _sums(self) -> tuple[Sequence[str], Tensor]:
        """Names and their sums, on the device: the host waits for them in `check` only."""
        names, tensors = zip(*self._engine.own_state(), strict=True)
        return names, torch.stack([bit_sum(x) for x in tensors])


def bit_sum(x: Tensor) -> Tensor:
    """The sum of x's memory as 64-bit words modulo 2⁶⁴, [] int64, in one pass. A flipped bit changes it by ± 2ⁿ."""
    octets = x.contiguous().view(-1).view(torch.uint8)
    start = -octets.storage_offset() % 8
    words = (len(octets) - start) // 8
    if words <= 0:
        return octets.sum()
    end = start + 8 * words
    total = octets[start:end].view(torch.int64).sum()
    return total if 8 * words == len(octets) else total + octets[:start].sum() + octets[end:].sum()


def _compare(sums: Sums, part: str) -> None:
    """Raise CorruptionError on all ranks if ranks with the same part of the weights differ."""
    digest = xxhash.xxh3_128_hexdigest(repr(sums).encode())
    digests = {tuple(pair) for pair in all_gather_object((part, digest))}
    if len(digests) == len({part for part, _ in digests}):
        return
    hosts, parts, sums_of_ranks = zip(*all_gather_object((socket.gethostname(), part, sums)), strict=True)
    corruptions = []
    for one in sorted(set(parts)):
        replicas = {rank: sums_of_ranks[rank] for rank, other in enumerate(parts) if other == one}
        corruptions += _corruptions(replicas, hosts)
    raise error_of_all_ranks([f"{'; '.join(corruptions)}; {FIX}"], CorruptionError)


def _corruptions(replicas: Mapping[int, Sums], hosts: Sequence[str]) -> list[str]:
    """The replicas that differ from the majority, and their differing tensors."""
    differing: dict[str, list[str]] = defaultdict(list)
    for name in next(iter(replicas.values())):
        [(majority, count)] = Counter(sums[name] for sums in replicas.values()).most_common(1)
        if 2 * count > len(replicas):
            ranks = name_ranks([rank for rank, sums in replicas.items() if sums[name] != majority], hosts)
        else:
            ranks = f"one of {name_ranks([*replicas], hosts)}, which have no majority"
        if count < len(replicas):
            differing[ranks].append(name)
    return [_corruption(ranks, names) for ranks, names in differing.items()]


def _corruption(ranks: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more tensors" if len(names) > MAX_NAMED else ""
    return f"silent data corruption on {ranks}: {', '.join(names[:MAX_NAMED])}{more}"
