"""Messages and memory of ranks on fake tensors, beside 2 and 8 ranks that train, and the plan of large worlds."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from executing import Executed, executed, executed_long
from memory_of_training import settings_of, train_measured
from test_plan_on_ranks import FEW_NUMBERS, by_kind

from tost_lm.config import find_recipe, load_config
from tost_lm.mixers.delta import spec as delta_spec
from tost_lm.pretrain.plan import traffic
from tost_lm.pretrain.plan.fit import complete
from tost_lm.pretrain.plan.groups import groups_of
from tost_lm.pretrain.plan.memory import peak_moment
from tost_lm.pretrain.plan.settings import PlanConfig
from tost_lm.testing import run_on_ranks

STEPS = [
    ("qwen3_5_4b", "train.batch_tokens=262144", "stages=[]"),
    ("qwen3_5_9b", "train.batch_tokens=262144", "stages=[]"),
    ("qwen3_5_9b", "cluster.nodes=8", "parallel.sequence=32", "train.seq_len=1048576", "train.batch_tokens=1048576",
     "stages=[]"),
    ("qwen3_5_27b", "cluster.nodes=8", "parallel.sequence=16", "train.batch_tokens=262144", "stages=[]"),
]  # fmt: skip
"""Steps of one micro-batch: those of docs/qwen3_5.md."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ranks", "shape"),
    [
        (2, {"data_ranks": 2}),
        (2, {"micro_batch": 8, "vocab_size": 512, "pattern": "TA", "parallel": {"sequence": 2}}),
        (2, {"micro_batch": 8, "parallel": {"tensor": 2}}),
        (8, {"layers": 2, "micro_batch": 4, "vocab_size": 512, "pattern": "DA", "tokens": 512, "data_ranks": 2,
             "parallel": {"tensor": 2, "sequence": 2, "zero_stage": 2}}),
    ],
)  # fmt: skip
def test_messages_equal_and_memory_within_a_twentieth(ranks: int, shape: dict[str, Any]):
    settings = settings_of(**shape)
    on_ranks = run_on_ranks(train_measured, ranks, settings, timeout_s=600)
    for measured, by_execution in zip(on_ranks, executed(settings, ranks, range(ranks)), strict=True):
        assert by_execution.sent == by_kind(measured)
        assert measured.peak_bytes == pytest.approx(by_execution.peak, rel=0.05)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("owt_tost_base", "cluster.nodes=128 parallel.sequence=1024 train.seq_len=1048576 train.global_batch_size=1 "
         "train.micro_batch_size=1 model.positions=none model.tssa.denom_bias=head"),
        ("owt_tost_large", "cluster.nodes=160 parallel.tensor=8 model.heads=16 train.micro_batch_size=3"),
    ],
)  # fmt: skip
def test_large_worlds_are_as_planned(recipe: str, words: str):
    config = planned(recipe, words.split())
    first, last = executed(settings(config), config.cluster.ranks, [0, config.cluster.ranks - 1])
    assert_as_planned(config, first, last, 0.01)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("words", STEPS, ids=" ".join)
def test_qwen3_5_is_as_planned(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
    """Whole models at 262,144 and 1,048,576 tokens on 8 and 64 ranks: bytes, order and memory of the first and last."""
    monkeypatch.setattr(delta_spec, "GROUP_ELEMENTS", delta_spec.DEVICE_GROUP_ELEMENTS)
    recipe, *others = words
    config = planned(recipe, others)
    first, last = executed_long(settings(config), config.cluster.ranks, [0, config.cluster.ranks - 1])
    assert_as_planned(config, first, last, 0.1, uneven=0.02)
    assert [message[:2] for message in first.messages] == [message[:2] for message in last.messages]
    # Weights of blocks are gathered in the order of the forward, and their gradients reduced in that of the backward.
    groups, ranks = groups_of(config, config.cluster.ranks), config.cluster.ranks // config.parallel.tensor
    gathers = [2 * group.padded // ranks for group in (groups.root, *groups.buckets)]
    reductions = [4 * group.padded for group in (*reversed(groups.buckets), groups.root)]
    sent = [one for one in first.messages if one.axis == "replicas" and one.kind != "all-reduce"]
    assert [(one.kind, one.bytes) for one in sent] == [
        *(("all-gather", size) for size in gathers), *(("reduce-scatter", size) for size in reductions)
    ]  # fmt: skip


def planned(recipe: str, words: list[str]) -> PlanConfig:
    always = ["train.compile=false", "run.device=cpu", "parallel.engine=fsdp"]
    return complete(load_config(PlanConfig, find_recipe(Path(recipe)), [*words, *always]))


def settings(config: PlanConfig) -> dict[str, Any]:
    return {name: getattr(config, name).model_dump(mode="json") for name in settings_of()}


def assert_as_planned(
    config: PlanConfig, first: Executed, last: Executed, tolerance: float, uneven: float = 0.0
) -> None:
    """`uneven`: of all-to-alls, where groups of sequence ranks differ in size and the plan has their average."""
    expected = defaultdict[str, float](float)
    for one in traffic.collectives(config):
        expected[one.kind] += one.input_bytes
    whole = peak_moment(config, config.cluster.ranks).total
    assert expected.keys() <= first.sent.keys() == last.sent.keys()
    for kind in first.sent:
        sizes = first.sent[kind][1], last.sent[kind][1]  # equal, but in all-to-alls with other rows on each rank
        least = min(sizes) * (1 - uneven) if kind == "all-to-all" else min(sizes)
        assert least - FEW_NUMBERS <= expected[kind] <= max(sizes)
    for one in (first, last):
        print(f"{one.peak / 1e9:.2f} GB of {whole / 1e9:.2f} planned")
        assert one.peak == pytest.approx(whole, rel=tolerance)
