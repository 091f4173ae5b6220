"""1,024 slices of a sequence in one process: joined by their statistics, they equal the sequence in one call."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from tost_lm.mixers.tssa.causal import causal_tssa
from tost_lm.ops.layout import SequenceSplit
from tost_lm.testing import assert_close

pytestmark = pytest.mark.quick

SLICES, H, D = 1024, 2, 3
LENGTHS = tuple(1 + rank % 3 for rank in range(SLICES))
T = sum(LENGTHS)
DOCUMENTS = torch.tensor((0, 1, 2, 700, 701, 1024, 2000, T), dtype=torch.int32)  # within slices, beside and across them
BORDERS = tuple(accumulate(LENGTHS, initial=0))


class Slices:
    """Each slice in a thread. What all have brought is scanned once, by columns, each with the function of another."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = [torch.empty(0)] * SLICES
        self._functions: list[Callable[[Tensor, slice], Tensor]] = [lambda rows, columns: rows] * SLICES
        self._barrier = threading.Barrier(SLICES, self._scan, timeout=60)
        self._turn = threading.Lock()  # one thread computes at a time: a thousand would wait for the interpreter

    def exchange(self, rank: int, row: Tensor, function: Callable[[Tensor, slice], Tensor]) -> Tensor:
        self._rows[rank], self._functions[rank] = row, function
        self._turn.release()
        try:
            self._barrier.wait()
        finally:
            self._turn.acquire()
        return self._result_R[rank].clone()

    def _scan(self) -> None:
        row_R = torch.stack(self._rows)
        columns = [slice(*ends) for ends in pairwise((0, 1, row_R.shape[-1] - 1, row_R.shape[-1]))]
        functions = self._functions[0], self._functions[500], self._functions[-1]
        results = [function(row_R[..., c], c) for function, c in zip(functions, columns, strict=True)]
        self._result_R = torch.cat(results, -1)

    def run(self, call: Callable[["Slice"], tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
        def in_thread(rank: int) -> tuple[Tensor, ...]:
            with self._turn:
                try:
                    return call(Slice(self, rank))
                except BaseException:
                    self._barrier.abort()
                    raise

        with ThreadPoolExecutor(SLICES) as threads:
            return list(threads.map(in_thread, range(SLICES)))


class Slice:
    """A `SequenceShard`."""

    gathers = True

    def __init__(self, slices: Slices, rank: int) -> None:
        self._slices, self.split = slices, SequenceSplit(LENGTHS, rank)

    def exchange_rows(self, row: Tensor, function: Callable[[Tensor, slice], Tensor]) -> Tensor:
        return self._slices.exchange(self.split.rank, row, function)

    def pass_on(self, like: Tensor, function: Callable[[Tensor, slice], Tensor], *, reverse: bool = False) -> Tensor:
        raise NotImplementedError

    def gather(self, x_BHTD: Tensor, lengths: Sequence[int] | None = None, *, keep: bool = True) -> Tensor:
        raise NotImplementedError


def output_and_gradients(shard: Slice | None, d_y: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    w, bias, temp = leaves = [x.detach().requires_grad_() for x in inputs]
    y, _ = causal_tssa(w, temp, bias.movedim(1, -1), cu_seqlens=DOCUMENTS, shard=shard)
    return y.detach(), *torch.autograd.grad(y, leaves, d_y)


def test_1024_slices_equal_the_whole_in_outputs_and_gradients():
    generator = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    d_y, w, bias, temp = random(1, T, H, D), random(1, T, H, D), random(1, T, H), random(H)

    def of_slice(one: Slice) -> tuple[Tensor, ...]:
        return output_and_gradients(one, *(one.split.shard(x) for x in (d_y, w, bias)), temp)

    y, d_w, d_bias, d_temp = zip(*Slices().run(of_slice), strict=True)
    joined = torch.cat(y, 1), torch.cat(d_w, 1), torch.cat(d_bias, 1), torch.stack(d_temp).sum(0)
    whole = output_and_gradients(None, d_y, w, bias, temp)
    for what, found, expected in zip(("y", "d_w", "d_bias", "d_temp"), joined, whole, strict=True):
        assert_close(found, expected, 1e-10, what)
