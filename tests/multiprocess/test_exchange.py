"""Exchanges of up to 8 sequence ranks, by one all-gather and as more ranks do, against one process."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from forked import CHECKOUT
from torch import Tensor
from toy_mixer import rank_shard

from tost_lm.mixers.plugins import run_plugin
from tost_lm.mixers.registry import SPECS
from tost_lm.mixers.spec import RecurrentSpec
from tost_lm.model import ModelConfig
from tost_lm.ops import affine
from tost_lm.ops.layout import LocalDocuments, SequenceSplit
from tost_lm.parallel import sequence
from tost_lm.testing import run_on_ranks
from tost_lm.testing.conformance.subject import State, Subject

LENGTHS = (1, 2, 9, 1, 1, 5, 2)
"""Tokens of the first ranks; the last one has the rest of T."""
T = 40
EXCHANGING = [*(letter for letter, spec in SPECS.items() if isinstance(spec, RecurrentSpec)), "H"]
"""Mixers whose ranks exchange statistics; those of softmax gather keys. H: HGRN2, a plugin."""
OFFSETS = (0, 2, 13, 14, 37, 40)  # across cuts, from cut to cut, within a shard
SETTINGS = {
    "layers": 1,
    "heads": 2,
    "width": 4,
    "positions": "none",
    "tssa": {"denom_bias": "head"},
    "max_positions": T,
}
"""Some of 8 ranks scan none of the 4 columns."""


class Found(NamedTuple):
    """On one rank."""

    error: float
    where: str
    states: dict[str, Tensor]
    """Final states and gradients of initial ones, by name."""


def compare_with_one_process(plugin: Path) -> list[Found]:
    run_plugin(plugin)
    return [found for letter in EXCHANGING for found in compare_layer(letter)]


def compare_layer(letter: str) -> list[Found]:
    subject = Subject.of(letter, ModelConfig(pattern=letter, **SETTINGS))
    ranks = dist.get_world_size()
    split = SequenceSplit((*LENGTHS[: ranks - 1], T - sum(LENGTHS[: ranks - 1])), dist.get_rank())
    found = []
    for offsets in (None, OFFSETS):
        B, documents = (2, 2) if offsets is None else (1, len(OFFSETS) - 1)
        x_BTC = subject.tokens(B, T)
        for states, output_state in ((None, False), (None, True), (subject.states(documents), True)):
            whole = partial(subject, offsets=offsets, output_state=output_state)
            expected = subject.results(whole, x_BTC, states)
            for sequence.ALL_GATHER_RANKS in (1, ranks):
                ours = subject.results(partial(on_this_rank, subject, split, offsets, output_state), x_BTC, states)
                in_states = {name: x for name, x in ours.items() if "state" in name}
                for name in ours.keys() - in_states.keys():
                    dist.all_reduce(ours[name])
                what = f"{letter}, offsets {offsets}, {'with' if output_state else 'without'} states"
                error, where = max(subject.differences(ours, expected, what))
                found.append(Found(error, where, in_states))
    return found


def on_this_rank(
    subject: Subject,
    split: SequenceSplit,
    offsets: tuple[int, ...] | None,
    output_state: bool,
    x_BTC: Tensor,
    states: State | None,
) -> tuple[Tensor, State | None]:
    """The outputs of this rank's tokens among zeros."""
    y, final = subject(split.shard(x_BTC), states, offsets, rank_shard(split), output_state)
    outputs = y.new_zeros(*x_BTC.shape[:2], *y.shape[2:])
    return outputs.index_copy(1, torch.arange(split.start, split.end), y), final


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.quick), 4, 5, 6, 7, 8])
def test_outputs_states_and_gradients_are_those_of_one_process(ranks: int):
    first, *others = run_on_ranks(compare_with_one_process, ranks, CHECKOUT / "experiments/hgrn2.py")
    assert len(first) == 12 * len(EXCHANGING)
    for case, of_others in zip(first, zip(*others, strict=True), strict=True):
        assert case.error < 1e-10, case.where
        for other in of_others:
            assert other.states.keys() == case.states.keys()
            for name, state in case.states.items():
                assert torch.equal(other.states[name], state), name


def gradients_where_a_rank_reads_no_state(gathers: bool) -> list[float]:
    """Of this rank's A and C, with a loss on the state before rank 2 and on numbers of rank 1 that depend on none."""
    ranks = dist.get_world_size()
    sequence.ALL_GATHER_RANKS = ranks if gathers else 1
    split = SequenceSplit((1,) * ranks, dist.get_rank())
    local = LocalDocuments.of(None, 1, 1, split)
    factor, added = (torch.full((1, 1, 1), x + split.rank, requires_grad=True) for x in (2.0, 5.0))

    def scan(before: Tensor) -> tuple[Tensor, Tensor]:
        output = {1: 0 * added, 2: before}.get(split.rank, 0 * before)
        return output, factor * before + added

    options = {"local": local, "shard": rank_shard(split), "output_final_state": False}
    output, _ = affine.affine_scan(scan, lambda *_: (factor, added), torch.zeros(1, 1, 1), **options)
    output.sum().backward()
    return [0.0 if x.grad is None else x.grad.item() for x in (factor, added)]


@pytest.mark.parametrize("gathers", [True, False])
def test_a_rank_whose_outputs_read_no_state_takes_part_in_the_backward(gathers: bool):
    found = run_on_ranks(gradients_where_a_rank_reads_no_state, 3, gathers)
    assert found == [[0.0, 3.0], [5.0, 1.0], [0.0, 0.0]]  # of A₁ C₀ + C₁
