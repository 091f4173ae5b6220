"""1,024 slices of a sequence in one process: joined by their statistics, they equal the sequence in one call."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from tost_lm.ops import causal_tssa
from tost_lm.ops.sequence_shard import LocalDocuments, SequenceSplit
from tost_lm.ops.slots import slot_memory
from tost_lm.testing import assert_close

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

    def __init__(self, slices: Slices, rank: int) -> None:
        self._slices, self.split = slices, SequenceSplit(LENGTHS, rank)

    def exchange_rows(self, row: Tensor, function: Callable[[Tensor, slice], Tensor]) -> Tensor:
        return self._slices.exchange(self.split.rank, row, function)

    def gather(self, x_BHTD: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
        raise NotImplementedError


def output_and_gradients(compute: Callable[..., Tensor], d_y: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = compute(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, d_y)


def tssa(cu_seqlens: Tensor | None, shard: Slice | None, w: Tensor, bias: Tensor, temp: Tensor) -> Tensor:
    return causal_tssa(w, temp, bias.movedim(1, -1), cu_seqlens=cu_seqlens, shard=shard)[0]


def slots(
    cu_seqlens: Tensor | None, shard: Slice | None, read: Tensor, write: Tensor, value: Tensor, log_decay: Tensor
) -> Tensor:
    local = LocalDocuments.of(cu_seqlens, read.shape[0], read.shape[1], shard and shard.split)
    return slot_memory(read, write, value, log_decay, local=local, shard=shard)[0]


@pytest.mark.parametrize(("operator", "cu_seqlens"), [(tssa, None), (slots, DOCUMENTS)])
def test_1024_slices_equal_the_whole_in_outputs_and_gradients(
    operator: Callable[..., Tensor], cu_seqlens: Tensor | None
):
    generator = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    if operator is tssa:
        of_tokens, of_model = [random(1, T, H, D), random(1, T, H)], [random(H)]
    else:
        of_tokens = [random(1, T, H, 2).softmax(-1), random(1, T, H, 2).softmax(-1), random(1, T, H, D)]
        of_model = [-random(H).exp() / 500]
    d_y = random(1, T, H, D)

    def of_slice(one: Slice) -> tuple[Tensor, ...]:
        here = [one.split.shard(x) for x in (d_y, *of_tokens)]
        return output_and_gradients(lambda *x: operator(cu_seqlens, one, *x), *here, *of_model)

    whole = output_and_gradients(lambda *x: operator(cu_seqlens, None, *x), d_y, *of_tokens, *of_model)
    joined = list(zip(*Slices().run(of_slice), strict=True))
    for index, expected in enumerate(whole):
        found = torch.cat(joined[index], 1) if index <= len(of_tokens) else torch.stack(joined[index]).sum(0)
        assert_close(found, expected, 1e-10, f"{operator.__name__} {index}")
