"""States that 17 to 256 simulated sequence ranks pass on: equal to one process, in few exchanges and few bytes."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tost_lm.model import ModelConfig
from tost_lm.ops.affine import affine_scan
from tost_lm.ops.layout import LocalDocuments, SequenceSplit
from tost_lm.parallel import sequence
from tost_lm.parallel.mesh import Axis
from tost_lm.parallel.sequence import RankShard
from tost_lm.sizes import rows_of_groups
from tost_lm.testing.conformance.subject import Subject

WAIT_S = 60.0
K, V = 3, 2


class Exchanges:
    """Collectives among threads. `received` has the elements that each of the calls of a rank brought from others."""

    def __init__(self, ranks: int):
        self.barrier, self.sent = threading.Barrier(ranks), [[Tensor()]] * ranks
        self.received: list[list[int]] = [[] for _ in range(ranks)]

    def exchange(self, parts_R: list[Tensor], rank: int) -> list[Tensor]:
        self.sent[rank] = parts_R
        self.barrier.wait(WAIT_S)
        found = [parts[rank].clone() for parts in self.sent]
        self.barrier.wait(WAIT_S)
        self.received[rank].append(sum(part.numel() for r, part in enumerate(found) if r != rank))
        return found


def all_to_all(x: Tensor, sent: list[int], received: list[int], axis: Axis) -> Tensor:
    found = axis.group.exchange(list(x.split(list(sent))), axis.rank)
    assert [len(part) for part in found] == list(received)
    return torch.cat(found)


def all_gather(x: Tensor, axis: Axis) -> Callable[[], Tensor]:
    found = torch.stack(axis.group.exchange([x] * axis.size, axis.rank))
    return lambda: found


def on_ranks(function: Callable[[RankShard], Any], splits: list[SequenceSplit]) -> tuple[list[Any], Exchanges]:
    """The results of all ranks, each a thread."""
    exchanges = Exchanges(len(splits))

    def on_rank(split: SequenceSplit) -> Any:
        try:
            return function(RankShard(Axis(split.rank, len(splits), exchanges), split))
        except BaseException:
            exchanges.barrier.abort()
            raise

    with ThreadPoolExecutor(len(splits)) as pool:
        return list(pool.map(on_rank, splits)), exchanges


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "all_to_all", all_to_all)
    monkeypatch.setattr(sequence, "all_gather", all_gather)


class Numbers(NamedTuple):
    """Maps of tokens, [B, T, K, K or 1] and [B, T, K, V], initial states [N, K, V], and weights of the loss."""

    factor: Tensor
    added: Tensor
    initial: Tensor
    of_outputs: Tensor
    of_finals: Tensor

    @classmethod
    def drawn(cls, B: int, T: int, documents: int, diagonal: bool) -> "Numbers":
        draws = torch.Generator().manual_seed(T + documents)
        shapes = [(B, T, K, 1 if diagonal else K), (B, T, K, V), (documents, K, V), (B, T, K, V), (documents, K, V)]
        factor, *others = (torch.randn(shape, dtype=torch.float64, generator=draws) for shape in shapes)
        return cls(factor.sigmoid() if diagonal else torch.linalg.qr(factor).Q, *others)

    def part(self, split: SequenceSplit) -> "Numbers":
        """Of a rank's tokens."""
        of_tokens = (split.shard(x) for x in (self.factor, self.added, self.of_outputs))
        factor, added, of_outputs = of_tokens
        return Numbers(factor, added, self.initial, of_outputs, self.of_finals)


def step(factor: Tensor, state: Tensor) -> Tensor:
    return factor * state if factor.shape[-1] == 1 else factor @ state


def results(all_numbers: Numbers, offsets: tuple[int, ...] | None, shard: RankShard) -> dict[str, Tensor]:
    """Outputs, final states and the gradients of this rank's maps and of all initial states."""
    numbers = all_numbers.part(shard.split)
    factor, added, initial = leaves = [x.clone().requires_grad_() for x in numbers[:3]]
    B, T = factor.shape[:2]
    local = LocalDocuments.of(None if offsets is None else torch.tensor(offsets, dtype=torch.int32), B, T, shard.split)
    factor_t, added_t = factor.flatten(0, 1), added.flatten(0, 1)

    def scan(before_n: Tensor) -> tuple[Tensor, Tensor]:
        outputs, finals = [], []
        for state, (start, end) in zip(before_n, pairwise(local.offsets), strict=True):
            for t in range(start, end):
                state = step(factor_t[t], state) + added_t[t]
                outputs.append(state)
            finals.append(state)
        return torch.stack(outputs), torch.stack(finals)

    def maps(tokens: slice, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        found, at = [], tokens.start
        for length in lengths:
            F = factor_t.shape[-1]
            whole, state = torch.eye(F, dtype=torch.float64).expand(K, F), torch.zeros(K, V, dtype=torch.float64)
            for t in range(at, at + length):
                whole, state = step(factor_t[t], whole), step(factor_t[t], state) + added_t[t]
            found.append((whole, state))
            at += length
        return torch.stack([whole for whole, _ in found]), torch.stack([state for _, state in found])

    output, final = affine_scan(scan, maps, initial, local=local, shard=shard, output_final_state=True)
    assert final is not None
    loss = (output * numbers.of_outputs.flatten(0, 1)).sum() + (final * numbers.of_finals).sum()
    gradients = torch.autograd.grad(loss, leaves)
    outputs = output.detach().unflatten(0, (B, T))
    return dict(
        zip(("factor", "added", "initial", "output", "final"), (*gradients, outputs, final.detach()), strict=True)
    )


CUTS = (0, 1, 9, 10, 40, 41, 43, 90, 150, 151, 1000)
"""Some ranks hold whole documents, some documents lie on many groups of ranks; bounded by the tokens."""


@pytest.mark.parametrize("diagonal", [True, False])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("ranks", [16, 17, 64, pytest.param(256, marks=pytest.mark.slow)])
def test_states_and_gradients_equal_those_of_one_process(ranks: int, packed: bool, diagonal: bool):
    lengths = tuple(1 + (7 * r) % 4 for r in range(ranks))
    T = sum(lengths)
    offsets = (*(cut for cut in CUTS if cut < T), T) if packed else None
    B, documents = (1, len(offsets) - 1) if offsets else (2, 2)
    numbers = Numbers.drawn(B, T, documents, diagonal)
    [expected], _ = on_ranks(partial(results, numbers, offsets), [SequenceSplit((T,), 0)])
    found, _ = on_ranks(partial(results, numbers, offsets), [SequenceSplit(lengths, r) for r in range(ranks)])
    for name, whole in expected.items():
        if name in ("initial", "final"):
            assert all(torch.equal(one[name], found[0][name]) for one in found)
            ours = found[0][name]
        else:
            ours = torch.cat([one[name] for one in found], 1)
        assert (ours - whole).norm() <= 1e-12 * whole.norm(), name


def test_a_nan_stays_in_its_document():
    ranks, offsets = 64, (0, 43, 90, 160)
    numbers = Numbers.drawn(1, 160, 3, diagonal=False)
    numbers.added[0, 10] = numbers.of_outputs[0, 150] = torch.nan
    splits = [SequenceSplit(tuple(2 + r % 2 for r in range(ranks)), r) for r in range(ranks)]
    found, _ = on_ranks(partial(results, numbers, offsets), splits)
    output, factor, added = (torch.cat([one[name] for one in found], 1) for name in ("output", "factor", "added"))
    assert output[:, 10:43].isnan().all()
    assert output[:, 43:].isfinite().all()
    assert added[:, 90:151].isnan().all()
    assert added[:, :90].isfinite().all()
    assert factor[:, 43:90].isfinite().all()


def exchanges_of_layer(ranks: int, T: int) -> tuple[set[int], list[int], list[int]]:
    """Of a delta layer on so many ranks: the exchanges in a forward and a backward, and the elements that each rank
    receives in both."""
    config = ModelConfig(pattern="D", layers=1, heads=2, width=8, positions="none")
    splits = [SequenceSplit.even(T, ranks, rank) for rank in range(ranks)]
    x_BTC = torch.randn(1, T, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    subject = Subject.of("D", config)

    def step(shard: RankShard) -> int:
        x = shard.split.shard(x_BTC).clone().requires_grad_()
        y, _ = subject(x, None, None, shard, False)
        forward = len(shard.axis.group.received[shard.axis.rank])
        torch.autograd.grad(y.sum(), x)
        return forward

    forwards, exchanges = on_ranks(step, splits)
    return set(forwards), [len(calls) for calls in exchanges.received], [sum(calls) for calls in exchanges.received]


@pytest.mark.parametrize("ranks", [64, pytest.param(256, marks=pytest.mark.slow)])
def test_a_layer_takes_four_exchanges_a_pass_and_twice_the_bytes_of_16_ranks_at_any_length(ranks: int):
    _, _, of_16 = exchanges_of_layer(16, 2 * ranks)
    forward, both, received = exchanges_of_layer(ranks, 2 * ranks)
    assert forward == {4}
    assert set(both) == {8}
    assert max(received) <= 2.2 * max(of_16)
    assert exchanges_of_layer(ranks, 3 * ranks)[2] == received


@pytest.mark.parametrize("ranks", [17, 64, 100, 256])
def test_ranks_receive_as_many_rows_as_planned(ranks: int):
    splits = [SequenceSplit((1,) * ranks, rank) for rank in range(ranks)]
    row = torch.zeros(5)
    _, exchanges = on_ranks(lambda shard: (shard.gather_group(row), shard.gather_groups(row)), splits)
    assert sum(map(sum, exchanges.received)) == pytest.approx(5 * ranks * rows_of_groups(ranks))
    assert max(map(sum, exchanges.received)) <= 5 * 2 * 15
