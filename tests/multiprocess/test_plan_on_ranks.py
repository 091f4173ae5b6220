"""Memory and messages of the plan and of ranks on fake tensors, beside those of ranks that train."""

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from all_to_alls import by_all_to_alls
from executing import KINDS, executed, in_process
from fake_rank import fake_world
from memory_of_training import Measured, Settings, settings_of, train_measured
from other_forms import OTHER_FORMS
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

from tost_lm import sizes
from tost_lm.config import validate
from tost_lm.parallel import mesh
from tost_lm.parallel.engine import Engine
from tost_lm.parallel.settings import ParallelConfig
from tost_lm.pretrain.engine import build_training_engine
from tost_lm.pretrain.plan import activations as plan_activations
from tost_lm.pretrain.plan import traffic
from tost_lm.pretrain.plan.memory import moments, peak_moment, weights_and_optimizer
from tost_lm.pretrain.plan.settings import PlanConfig
from tost_lm.pretrain.settings import PretrainConfig
from tost_lm.testing import run_on_ranks

RANKS = 2
SMALL: dict[str, Any] = {"width": 128, "vocab_size": 4096, "tokens": 256, "micro_batch": 8, "micro_batches": 2}
FEW_NUMBERS = 128
"""Bytes of single numbers that are summed over ranks, beside what is planned."""
OF_NUMBERS = 3
"""Their all-reduces: of labels, losses and norm."""
TINY = {**SMALL, "width": 64, "layers": 2, "vocab_size": 512, "micro_batch": 2}
ODD = {**TINY, "width": 60, "heads": 5, "layers": 3, "vocab_size": 513, "micro_batches": 1, "pattern": "TDA"}
BUCKET = 50_000  # elements: of each of its blocks


@pytest.mark.parametrize(
    ("axis", "model"),
    [
        ("sequence", {"pattern": "DA", "softmax": {"conv": True}}),
        pytest.param("tensor", {"pattern": "DA"}, marks=pytest.mark.slow),
        *(
            pytest.param(axis, {"pattern": "TA", **forms}, marks=pytest.mark.slow)
            for axis in ("sequence", "tensor")
            for forms in ({}, OTHER_FORMS)
        ),
    ],
)
def test_memory_to_a_tenth_and_messages_to_the_byte(axis: str, model: dict[str, Any]):
    settings = settings_of(**SMALL, **model, parallel={axis: RANKS})
    for measured in run_on_ranks(train_measured, RANKS, settings):
        assert peak_moment(planned(settings), RANKS).total == pytest.approx(measured.peak_bytes, rel=0.1)
        assert_sent_as_planned(measured, settings)


@pytest.mark.parametrize("tied_head", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("zero_stage", "copies"),
    [(0, 1), (1, 1), (2, 1), (3, 1), *(pytest.param(n, 2, marks=pytest.mark.slow) for n in (1, 3))],
)
def test_messages_of_stages(zero_stage: int, copies: int, tied_head: bool, monkeypatch: pytest.MonkeyPatch):
    """Of odd sizes, which are padded, and several buckets; in one and two micro-batches, in tiles and in bfloat16."""
    ways: list[dict[str, Any]] = [{}, {"micro_batches": 2, "memory": {"tile_tokens": 100}}]
    if zero_stage:
        ways += [{"micro_batches": 2, "dtype": "bfloat16"}]
    ranks, parallel = copies * RANKS, {"zero_stage": zero_stage, "shard_ranks": RANKS if copies > 1 else None}
    layout = {"data_ranks": ranks, "parallel": parallel}
    some = [settings_of(**{**ODD, **layout, **way}, tied_head=tied_head) for way in ways]
    monkeypatch.setattr(sizes, "BUCKET_ELEMENTS", BUCKET)
    for settings, measured in zip(some, run_on_ranks(train_all_measured, ranks, some, timeout_s=280)[0], strict=True):
        assert_sent_as_planned(measured, settings, ranks)
        if zero_stage:
            calls = Counter[str]({"all-reduce": OF_NUMBERS})
            for one in traffic.collectives(planned(settings, ranks)):
                calls[one.kind] += int(one.calls)
            assert {kind: calls for kind, (calls, _) in by_kind(measured).items()} == calls


def bytes_of_whole_weights(some: list[Settings]) -> list[tuple[int, int]]:
    """After the forward, and after the backward."""
    found = []
    for settings in some:
        config = validate(PretrainConfig, settings, "test")
        engine = build_training_engine(config, mesh.build_mesh(mesh.start_world("cpu"), config.parallel))
        engine.draw_weights()
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        loss = engine(tokens, labels=tokens, output_state=False).loss
        assert loss is not None
        after_forward = _whole_bytes(engine)
        engine.backward([loss])
        found.append((after_forward, _whole_bytes(engine)))
    return found


def _whole_bytes(engine: Engine) -> int:
    whole = (parameter for parameter in engine.module.parameters() if not isinstance(parameter, DTensor))
    return sum(parameter.untyped_storage().nbytes() for parameter in whole)


def test_weights_that_are_whole_are_planned():
    cases = [(2, False), (3, True), (3, False)]  # ZeRO stage, tied head
    some = [settings_of(**ODD, data_ranks=RANKS, tied_head=tied, parallel={"zero_stage": n}) for n, tied in cases]
    for found in run_on_ranks(bytes_of_whole_weights, RANKS, some):
        for settings, (after_forward, after_backward) in zip(some, found, strict=True):
            config = planned(settings)
            assert after_forward == moments(config, RANKS)[0].weights - weights_and_optimizer(config, RANKS)[0]
            assert after_backward == 0


def train_all_measured(some: list[Settings]) -> list[Measured]:
    sizes.BUCKET_ELEMENTS = BUCKET
    return [train_measured(settings) for settings in some]


@pytest.mark.parametrize(
    ("pattern", "layer_scale", "memory"),
    [
        pytest.param("TA", 0.1, {"activation_checkpointing": "full", "mlp_tile_tokens": 32}, marks=pytest.mark.slow),
        pytest.param("TD", 0.1, {"activation_checkpointing": "full", "mlp_tile_tokens": 32}, marks=pytest.mark.slow),
        ("DA", 0.1, {"activation_checkpointing": "full"}),
        *(
            pytest.param("DA", 0.0, {"activation_checkpointing": "full", **more}, marks=pytest.mark.slow)
            for more in ({}, {"mlp_tile_tokens": 32})
        ),
    ],
)
def test_messages_of_what_is_computed_again(pattern: str, layer_scale: float, memory: dict[str, Any]):
    shape = {**TINY, "pattern": pattern, "layer_scale": layer_scale}
    settings = settings_of(**shape, parallel={"tensor": RANKS}, memory=memory)
    on_ranks = run_on_ranks(train_measured, RANKS, settings)
    for measured in on_ranks:
        assert_sent_as_planned(measured, settings)
    if pattern == "TD":
        assert [one.sent for one in executed(settings, RANKS, [1])] == [by_kind(on_ranks[1])]


@pytest.mark.parametrize(
    ("pattern", "window", "memory"),
    [
        pytest.param("TA", 30, {"tile_tokens": 100}, marks=pytest.mark.quick),
        pytest.param("DA", 30, {"tile_tokens": 100}, marks=pytest.mark.slow),
        pytest.param("DA", 0, {"tile_tokens": 100}, marks=pytest.mark.slow),
        pytest.param("TA", 0, {"tile_tokens": 60, "activation_checkpointing": "full"}, marks=pytest.mark.slow),
        pytest.param("TD", 0, {"tile_tokens": 100, "activation_checkpointing": "full"}, marks=pytest.mark.slow),
    ],
)
def test_messages_of_tiles(pattern: str, window: int, memory: dict[str, Any]):
    softmax = {"window": window, "conv": pattern == "DA"}
    settings = settings_of(**TINY, pattern=pattern, softmax=softmax, parallel={"sequence": RANKS}, memory=memory)
    on_ranks = run_on_ranks(train_measured, RANKS, settings)
    for measured in on_ranks:
        assert_sent_as_planned(measured, settings)
    if pattern == "DA":
        assert [one.sent for one in executed(settings, RANKS, [1])] == [by_kind(on_ranks[1])]


@pytest.mark.slow
@pytest.mark.parametrize("tile_tokens", [256, 100])
def test_messages_of_all_to_alls(tile_tokens: int, monkeypatch: pytest.MonkeyPatch):
    settings = settings_of(**TINY, heads=8, pattern="T", parallel={"sequence": 4}, memory={"tile_tokens": tile_tokens})
    monkeypatch.setattr(plan_activations, "ALL_GATHER_RANKS", 1)
    on_ranks = run_on_ranks(by_all_to_alls, 4, train_measured, settings)
    for measured in on_ranks:
        assert_sent_as_planned(measured, settings)
    if tile_tokens == 100:
        found = executed(settings, 4, [0, 3], ALL_GATHER_RANKS=1)
        assert [one.sent for one in found] == [by_kind(on_ranks[rank]) for rank in (0, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("tile_tokens", [256, 100])
def test_messages_of_maps_that_groups_gather(tile_tokens: int, monkeypatch: pytest.MonkeyPatch):
    """On average: groups may differ in size."""
    settings = settings_of(**TINY, heads=8, pattern="DT", parallel={"sequence": 4}, memory={"tile_tokens": tile_tokens})
    monkeypatch.setattr(plan_activations, "ALL_GATHER_RANKS", 1)
    on_ranks = run_on_ranks(by_all_to_alls, 4, train_measured, settings)
    expected = [one for one in traffic.collectives(planned(settings)) if one.kind == "all-to-all"]
    sent = [measured.sent["all_to_all_single"] for measured in on_ranks]
    assert {calls for calls, _ in sent} == {sum(one.calls for one in expected)}
    assert sum(size for _, size in sent) == 4 * sum(one.input_bytes for one in expected)


def by_kind(measured: Measured) -> dict[str, tuple[int, int]]:
    """Calls and bytes, as the plan names kinds."""
    found = {}
    for kind, names in KINDS.items():
        sent = [sent for name, sent in measured.sent.items() if name in names]
        if sent:
            found[kind] = (sum(calls for calls, _ in sent), sum(size for _, size in sent))
    assert sum(calls for calls, _ in found.values()) == sum(calls for calls, _ in measured.sent.values())
    return found


def assert_sent_as_planned(measured: Measured, settings: Settings, ranks: int = RANKS) -> None:
    config = planned(settings, ranks)
    for kind, names in KINDS.items():
        expected = sum(one.input_bytes for one in traffic.collectives(config) if one.kind == kind)
        sent = sum(size for name, (_, size) in measured.sent.items() if name in names)
        assert expected <= sent <= expected + FEW_NUMBERS


def planned(settings: Settings, ranks: int = RANKS) -> PlanConfig:
    """On so many ranks, or as many as a copy of the model has."""
    ranks = max(ranks, validate(ParallelConfig, settings["parallel"], "test").model_ranks)
    return validate(PlanConfig, {**settings, "cluster": {"gpus_per_node": ranks}}, "test")


def groups_of(rank: int, size: int, layouts: list[ParallelConfig]) -> list[tuple[dict[str, list[int]], int]]:
    """For each layout, the ranks in each group of a rank, on nodes of eight, and how many groups it has created."""
    found, helper = [], distributed_c10d._new_process_group_helper
    for layout in layouts:
        with (
            fake_world(rank, size) as world,
            patch.object(distributed_c10d, "_new_process_group_helper", wraps=helper) as create,
            patch.object(mesh, "all_gather_object", lambda _: [rank // 8 for rank in range(size)]),
        ):
            axes = mesh.build_mesh(world, layout)._asdict()
            groups = {name: axes[name].group for name in ("tensor", "sequence", "data", "replicas", "node")}
            groups = {name: group for name, group in groups.items() if group}
            assert all(dist.get_rank(group) == axes[name].rank for name, group in groups.items())
            found.append(({name: dist.get_process_group_ranks(groups[name]) for name in groups}, create.call_count))
    return found


def test_a_rank_of_many_creates_only_the_groups_that_it_communicates_over():
    layouts = [ParallelConfig(), ParallelConfig(sequence=1024), ParallelConfig(tensor=2, sequence=16)]
    everyone, node = [*range(1024)], [*range(696, 704)]
    assert in_process(groups_of, 701, 1024, layouts) == [
        ({"replicas": everyone, "node": node}, 1),
        ({"sequence": everyone, "replicas": everyone, "node": node}, 2),
        (
            {"tensor": [700, 701], "sequence": [*range(673, 704, 2)], "replicas": [*range(1, 1024, 2)], "node": node},
            4,
        ),
    ]
