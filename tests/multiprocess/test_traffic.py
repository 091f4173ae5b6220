"""Messages of each kind of parallelism, counted in the dispatcher: how many collectives, and how many bytes."""

from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from all_to_alls import by_all_to_alls

from tost_lm import torch_internals
from tost_lm.config import validate
from tost_lm.model import ModelConfig, TostLM
from tost_lm.model.transforms import apply_activation_checkpointing, compile_blocks
from tost_lm.parallel.apply import even_split, parallelize, shard_of
from tost_lm.parallel.mesh import build_mesh, keep_received, start_world
from tost_lm.parallel.settings import ParallelConfig
from tost_lm.testing import Traffic, run_on_ranks

H, C = 2, 8
KIND, OTHER_KIND = "all_gather_into_tensor", "all_to_all_single"
STATISTICS_BYTES = 8 * (2 * C + H)  # float32, of one sequence, forward and backward
PACKED = (0, 1, 500, 511, 513, 1024)  # boundaries at the ends, inside a shard and beside those between two and four
RECOMPUTED: dict[str, dict[str, Any]] = {
    "never": {},
    "all of it": {"activation_checkpointing": "full"},
    "but what was received": {"activation_checkpointing": "full", "context_fn": keep_received},
}


Sendings = list[tuple[str, int]]
"""Kind and bytes of each collective."""


class Case(NamedTuple):
    tokens: int
    sequences: int = 1
    layers: int = 1
    pattern: str = "T"
    tensor: bool = False
    offsets: tuple[int, ...] = ()
    recomputed: str = "never"
    compiled: bool = False


DELTA_CASES = [
    Case(tokens=1024, pattern="D"),
    Case(tokens=16384, pattern="D"),
    Case(tokens=1024, pattern="D", layers=2, sequences=3),
    Case(tokens=1024, pattern="D", offsets=PACKED),
    Case(tokens=64, pattern="D", recomputed="but what was received"),
]


def sent_in_steps(cases: list[Case]) -> list[tuple[Sendings, Sendings]]:
    """The messages of this rank in the forward and in the backward of each."""
    return [sent_in_step(case) for case in cases]


def sent_in_step(case: Case) -> tuple[Sendings, Sendings]:
    ranks = dist.get_world_size()
    parallel = ParallelConfig(tensor=ranks) if case.tensor else ParallelConfig(sequence=ranks)
    mesh = build_mesh(start_world("cpu"), parallel)
    shape = {"layers": case.layers, "heads": H, "width": C, "vocab_size": 8, "pattern": case.pattern}
    settings = {"positions": "none", "tssa": {"denom_bias": "head"}, **shape}
    model = apply_activation_checkpointing(
        parallelize(TostLM(validate(ModelConfig, settings, "test")), mesh), **RECOMPUTED[case.recomputed]
    )
    if case.compiled:
        with patch.object(torch_internals, "_compile_for_any_address", "aot_eager"):
            compile_blocks(model)
    split = even_split(mesh, case.tokens)
    tokens = split.shard(torch.randint(8, (case.sequences, case.tokens), generator=torch.Generator().manual_seed(0)))
    options: dict[str, Any] = {"shard": shard_of(mesh, split), "output_state": False, "label_count": 1.0}
    if case.offsets:
        options["cu_seqlens"] = torch.tensor(case.offsets, dtype=torch.int32)
    with Traffic() as forward:
        loss = model(tokens, labels=tokens, **options).loss
    with Traffic() as backward:
        loss.backward()
    axis = mesh.tensor if case.tensor else mesh.sequence
    assert {sent.group for sent in forward.sent + backward.sent} == {axis.group.group_name}
    return [(sent.kind, sent.bytes) for sent in forward.sent], [(sent.kind, sent.bytes) for sent in backward.sent]


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.quick), pytest.param(4, marks=pytest.mark.slow)])
def test_a_delta_layer_sends_maps_of_states_forward_and_gradients_backward_whatever_the_length(ranks: int):
    K = V = C // H
    tokens = 4 * 3 * H * (2 * K + V)  # the last three before the convolution, and a map that moves three
    for on_rank in run_on_ranks(sent_in_steps, ranks, DELTA_CASES):
        for case, (forward, backward) in zip(DELTA_CASES, on_rank, strict=True):
            sizes = [[tokens + 4 * 9, 4 * H * K * (K + V)], [4 * H * K * V, tokens]]
            expected = [[(KIND, case.sequences * size) for size in way] * case.layers for way in sizes]
            assert [forward, backward] == expected, case


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.quick), pytest.param(4, marks=pytest.mark.slow)])
def test_a_tssa_layer_sends_its_statistics_four_times_whatever_the_length_and_the_ranks(ranks: int):
    cases = [
        Case(tokens=1024),
        Case(tokens=65536),
        Case(tokens=1024, layers=3),
        Case(tokens=1024, sequences=3),
        Case(tokens=1024, offsets=PACKED),
        Case(tokens=65536, offsets=(0, *range(7, 65536, 8191), 65536)),
    ]
    for on_rank in run_on_ranks(sent_in_steps, ranks, cases):
        for case, (forward, backward) in zip(cases, on_rank, strict=True):
            assert [kind for kind, _ in forward] == [KIND] * 2 * case.layers
            assert [kind for kind, _ in backward] == [KIND] * 2 * case.layers
            total = sum(size for _, size in forward + backward)
            assert total == STATISTICS_BYTES * case.layers * case.sequences, case


@pytest.mark.parametrize("ranks", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_by_all_to_alls_a_rank_sends_two_rows_for_each_exchange(ranks: int):
    """First its own row, a slice of the columns to each rank, then its slice of the results of each rank."""
    cases = [
        Case(tokens=1024),
        Case(tokens=1024, layers=2, sequences=3),
        Case(tokens=1024, offsets=PACKED),
    ]
    on_ranks = run_on_ranks(by_all_to_alls, ranks, sent_in_steps, cases)
    for case, *steps in zip(cases, *on_ranks, strict=True):
        rows = [size * case.sequences for size in (4 * C, 4 * (C + H))]
        for ways, expected in zip(
            zip(*steps, strict=True), (rows * case.layers, rows[::-1] * case.layers), strict=True
        ):
            assert {kind for way in ways for kind, _ in way} == {OTHER_KIND}
            for way in ways:
                assert [size for _, size in way[::2]] == expected
            # A row on average: where ranks do not divide the columns, the first ranks scan one more.
            second = zip(*([size for _, size in way[1::2]] for way in ways), strict=True)
            assert [sum(sizes) for sizes in second] == [ranks * size for size in expected]


SENT_TO = {3: ((1, 1, 0), (1, 0, 2)), 8: ((2, 2, 2, 2, 2, 2, 1, 1), (2, 2, 1, 2, 2, 1, 4, 2))}
"""The others to which each rank sends a row within groups of 2 and of 3 ranks, and between groups."""


@pytest.mark.parametrize("ranks", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_delta_layers_gather_maps_within_groups_and_between_them_whatever_the_length(ranks: int):
    """Those of the convolution first; the backward in reverse, with gradients of states."""
    K = V = C // H
    for rank, on_rank in enumerate(run_on_ranks(by_all_to_alls, ranks, sent_in_steps, DELTA_CASES)):
        rows = [others[rank] for others in SENT_TO[ranks]]
        for case, (forward, backward) in zip(DELTA_CASES, on_rank, strict=True):
            assert {kind for kind, _ in forward + backward} == {OTHER_KIND}
            assert len(forward) == len(backward) == 4 * case.layers
            for layer in range(case.layers):
                of_layer = slice(4 * layer, 4 * layer + 4)
                of_maps, of_gradients = forward[of_layer][2:], backward[of_layer][:2]
                size = case.sequences * 4 * H * K
                assert [bytes_ for _, bytes_ in of_maps] == [size * (K + V) * row for row in rows], case
                assert [bytes_ for _, bytes_ in of_gradients] == [size * V * row for row in rows], case


@pytest.mark.parametrize(("run", "collectives"), [(partial, 1), (partial(partial, by_all_to_alls), 2)])
def test_recomputation_sends_nothing_where_what_was_received_is_kept(run: Any, collectives: int):
    cases = [Case(tokens=64, layers=2, pattern="TA", recomputed=recomputed) for recomputed in RECOMPUTED]
    never, wholly, kept, compiled = run_on_ranks(run(sent_in_steps), 2, [*cases, cases[-1]._replace(compiled=True)])[0]
    assert kept == never
    assert compiled == never
    forward, backward = wholly
    assert forward == never[0]
    assert len(forward) == 2 * collectives + 2
    # Both exchanges of the TSSA layer and of the softmax layer once more.
    assert sorted(backward) == sorted(never[1] + forward)


@pytest.mark.quick
def test_a_softmax_layer_exchanges_tokens_for_heads_and_back():
    tokens, ranks = 1024, H
    [(forward, backward)] = run_on_ranks(sent_in_steps, ranks, [Case(tokens, sequences=2, pattern="A")])[1]
    queries = 4 * 2 * (tokens // ranks) * C
    assert forward == [(OTHER_KIND, 3 * queries), (OTHER_KIND, queries)]
    assert backward == forward[::-1]


def test_over_tensor_ranks_heads_send_one_number_a_token_and_three_back_and_the_loss_two():
    tokens = 64
    [(forward, backward)] = run_on_ranks(sent_in_steps, 2, [Case(tokens, sequences=2, tensor=True)])[0]
    # megatron-core's layers gather with torch.distributed's calls.
    ours = [[size for kind, size in way if kind == KIND] for way in (forward, backward)]
    assert ours == [[2 * 4 * tokens, 2 * 2 * 4 * tokens], [2 * 3 * 4 * tokens]]
    # Embedding; in and out of mixer and MLP; head.
    assert [kind for kind, _ in forward if kind.startswith("c10d.")] == [
        "c10d._reduce_scatter_base_", *["c10d._allgather_base_", "c10d._reduce_scatter_base_"] * 2,
        "c10d._allgather_base_",
    ]  # fmt: skip
