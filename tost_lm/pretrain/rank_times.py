"""Which rank is slow: what each rank measures of its steps, and what rank 0 reads from all of them."""

import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from tost_lm.model.lm import TostLM
from tost_lm.parallel.mesh import Mesh

STRAGGLES = 1.2
"""A rank that takes as many times as long as the median one is a straggler."""


class RankTimes:
    """The seconds that this rank waited for data, and those that its blocks took in forwards.

    In these, a copy of the model waits for no other one: weights that ZeRO gathers come before a block, and gradients
    are reduced in backwards. DeepSpeed's stage 3 alone gathers within blocks. Ranks of one copy do wait for each other.
    """

    def __init__(self, model: TostLM, mesh: Mesh) -> None:
        self._mesh, self._waited_s, self._computed_s = mesh, 0.0, 0.0
        self._began: Any = None
        self._forwards: list[tuple[Any, Any]] = []
        for block in model.blocks:
            block.register_forward_pre_hook(self._begin)  # after that of `fully_shard`, which waits
            block.register_forward_hook(self._end)

    def begin_step(self, waited_s: float) -> None:
        """A step begins, after a wait for its batch. The device has finished all forwards before it."""
        self._waited_s += waited_s
        self._computed_s += sum(_seconds(*forward) for forward in self._forwards)
        self._forwards.clear()

    def take(self) -> list[float]:
        """Numbers [2 · ranks] whose sums over all ranks are the seconds of each, up to the begin of this step, since
        the last call: of data, then of forwards."""
        numbers, here = [0.0] * (2 * self._mesh.replicas.size * self._mesh.tensor.size), 2 * self._mesh.rank
        numbers[here : here + 2] = self._waited_s, self._computed_s
        self._waited_s = self._computed_s = 0.0
        return numbers

    def _begin(self, block: nn.Module, arguments: Any) -> None:
        self._began = self._now()

    def _end(self, block: nn.Module, arguments: Any, output: Any) -> None:
        if block.training:
            self._forwards.append((self._began, self._now()))

    def _now(self) -> Any:
        if self._mesh.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(began: Any, ended: Any) -> float:
    return ended - began if isinstance(began, float) else began.elapsed_time(ended) / 1e3


class Slowest(NamedTuple):
    """The rank that takes longest."""

    rank: int
    over_median: float
    """Its seconds over those of the median rank, of two ranks the faster one."""
    waited_s: float
    computed_s: float

    @property
    def straggles(self) -> bool:
        return self.over_median >= STRAGGLES


def slowest(seconds: Sequence[float]) -> Slowest | None:
    """Find it in the sums of what all ranks took with `RankTimes.take`; None: there is one rank, or no forward yet."""
    times = list(zip(seconds[::2], seconds[1::2], strict=True))
    if len(times) < 2 or not all(computed for _, computed in times):
        return None
    totals = [waited + computed for waited, computed in times]
    rank = totals.index(max(totals))
    return Slowest(rank, totals[rank] / statistics.median_low(totals), *times[rank])
