"""Which rank is slow: what each rank measures of its steps, and what rank 0 reads from all of them."""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from tost_lm.model.lm import TostLM
from tost_lm.parallel.mesh import Mesh, around_waits

STRAGGLES = 1.2
"""A rank that takes as many times as long as the median one is a straggler."""


class RankTimes:
    """The seconds that this rank waited for data, and those that its blocks computed in forwards.

    Not in these are its waits for other ranks: for sequence ranks they are measured and subtracted, the weights of ZeRO
    are gathered before a block (but by DeepSpeed's stage 3), and gradients are reduced in backwards. Tensor ranks wait
    for each other within a block.
    """

    def __init__(self, model: TostLM, mesh: Mesh) -> None:
        self._mesh, self._waited_s, self._computed_s = mesh, 0.0, 0.0
        self._intervals: list[tuple[int, Any, Any]] = []
        """1 for a forward and -1 for a wait within it, its begin and its end."""
        for block in model.blocks:
            block.register_forward_pre_hook(self._begin)  # after that of `fully_shard`, which waits
            block.register_forward_hook(self._end, prepend=True)

    def begin_step(self, waited_s: float) -> None:
        """A step begins, after a wait for its batch. The device has finished all forwards before it."""
        self._waited_s += waited_s
        self._computed_s += sum(sign * _seconds(began, ended) for sign, began, ended in self._intervals)
        self._intervals = []

    def take(self) -> list[float]:
        """Numbers [2 · ranks] whose sums over all ranks are the seconds of each, up to the begin of this step, since
        the last call: of data, then of forwards."""
        numbers, here = [0.0] * (2 * self._mesh.replicas.size * self._mesh.tensor.size), 2 * self._mesh.rank
        numbers[here : here + 2] = self._waited_s, self._computed_s
        self._waited_s = self._computed_s = 0.0
        return numbers

    def _begin(self, block: nn.Module, arguments: Any) -> None:
        self._began, self._waits, self._outside = self._now(), [], around_waits.set(self._waiting)

    def _end(self, block: nn.Module, arguments: Any, output: Any) -> None:
        around_waits.reset(self._outside)
        if block.training:
            self._intervals += [*self._waits, (1, self._began, self._now())]

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began = self._now()
        yield
        self._waits.append((-1, began, self._now()))

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


def slowest(seconds: Sequence[float]) -> Slowest | None:
    """Find it in the sums of what all ranks took with `RankTimes.take`; None: there is one rank, or no forward yet."""
    times = list(zip(seconds[::2], seconds[1::2], strict=True))
    if len(times) < 2 or not all(computed > 0 for _, computed in times):
        return None
    totals = [waited + computed for waited, computed in times]
    rank = totals.index(max(totals))
    return Slowest(rank, totals[rank] / statistics.median_low(totals), *times[rank])
