"""Sequence ranks equal one process."""

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tost_lm.ops.sequence_shard import SequenceSplit
from tost_lm.testing.conformance.adapter import TOKENS, MixerAdapter, State, Subject, cotangent, leaf, named
from tost_lm.testing.ranks import run_on_ranks

RANKS = 3


class _Case(NamedTuple):
    """Tokens in one or more tiles, each of them split over the ranks; states are carried between tiles."""

    what: str
    x_BTC: Tensor
    splits: tuple[tuple[int, ...], ...]
    """Tokens of each rank in each tile, [R]."""
    offsets: tuple[tuple[int, ...] | None, ...]
    """Of the documents in each tile."""
    initial: State | None
    output_state: bool


def rank_differences(subject: Subject, T: int) -> Iterator[tuple[float, str]]:
    """Rows and packed documents on 3 ranks against one process."""
    cases = list(_cases(subject, T))
    expected = [_results(subject, case, None) for case in cases]
    for found in run_on_ranks(_on_rank, RANKS, subject.adapter, subject.seed, cases):
        for case, ours, theirs in zip(cases, found, expected, strict=True):
            yield from subject.differences(ours, theirs, case.what)


def _on_rank(adapter: MixerAdapter, seed: int, cases: list[_Case]) -> list[dict[str, Tensor]]:
    subject = Subject(adapter, seed)
    return [_results(subject, case, dist.get_rank()) for case in cases]


def _cases(subject: Subject, T: int) -> Iterator[_Case]:
    """Shards of 1 and 2 tokens among long ones; documents that cross a cut, end at it and lie within a shard."""
    adapter = subject.adapter
    whole = (T // 2 - 1, 2, T - T // 2 - 1)
    yield _Case(f"rows on ranks of {whole}", subject.tokens(2, T), (whole,), (None,), None, False)
    if adapter.has_state:
        n = T // 2
        splits = ((n - 3, 1, 2), (1, 2, T - n - 3))
        yield _Case(f"rows in tiles on {splits}", subject.tokens(2, T), splits, (None, None), None, True)
        yield _Case("rows that continue", subject.tokens(2, T), (whole,), (None,), subject.states(2), True)
    if adapter.has_documents:
        documents = (0, 2, whole[0], whole[0] + 1, T - 3, T)
        packed = subject.tokens(1, T)
        yield _Case(f"documents at {documents} on {whole}", packed, (whole,), (documents,), None, False)
        short = (1, 2, T - 3)
        yield _Case(f"documents at {documents} on {short}", packed, (short,), (documents,), None, False)
        if adapter.has_state:
            states = subject.states(len(documents) - 1)
            yield _Case(f"documents that continue, on {short}", packed, (short,), (documents,), states, True)


def _results(subject: Subject, case: _Case, rank: int | None) -> dict[str, Tensor]:
    """Outputs, final states, and gradients of a loss on the outputs; summed over ranks, except for the states.

    Gradients of states only pass from tile to tile: a mixer may keep the whole gradient on each rank, or a part.
    """
    x_BTC, state, outputs = leaf(case.x_BTC), case.initial, None
    for start, lengths, offsets in zip(_starts(case), case.splits, case.offsets, strict=True):
        split = SequenceSplit((sum(lengths),), 0) if rank is None else SequenceSplit(lengths, rank)
        shard = None if rank is None else subject.adapter.shard(split)  # pyright: ignore[reportOptionalCall]
        columns = slice(start + split.start, start + split.end)
        y, state = subject(x_BTC[:, columns], state, offsets, shard, case.output_state)
        if outputs is None:
            outputs = y.new_zeros(*x_BTC.shape[:2], *y.shape[2:])
        outputs = outputs.index_copy(1, torch.arange(columns.start, columns.stop, device=y.device), y)
    assert outputs is not None
    outputs.backward(cotangent("outputs", outputs))
    found = {"outputs": outputs.detach()}
    for name, x in ({TOKENS: x_BTC} | subject.parameters).items():
        found[f"gradient of {name}"] = torch.zeros_like(x) if x.grad is None else x.grad
    subject.mixer.zero_grad()
    if rank is not None:
        for x in found.values():
            dist.all_reduce(x)
    return found | {name: x.detach() for name, x in named("final state", state).items()}


def _starts(case: _Case) -> list[int]:
    """The first token of each tile."""
    return [0, *accumulate(map(sum, case.splits[:-1]))]
