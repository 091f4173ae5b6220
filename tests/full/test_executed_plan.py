"""Messages and memory of ranks on fake tensors, beside 2 and 8 ranks that train, and the plan of large worlds."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from executing import executed
from memory_of_training import settings_of, train_measured
from test_plan_on_ranks import FEW_NUMBERS, by_kind

from tost_lm.config import find_recipe, load_config
from tost_lm.pretrain.plan import traffic
from tost_lm.pretrain.plan.fit import complete
from tost_lm.pretrain.plan.memory import peak_moment
from tost_lm.pretrain.plan.settings import PlanConfig
from tost_lm.testing import run_on_ranks


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ranks", "shape"),
    [
        (2, {"data_ranks": 2}),
        (2, {"micro_batch": 8, "vocab_size": 512, "pattern": "TA", "parallel": {"sequence": 2}}),
        (2, {"micro_batch": 8, "parallel": {"tensor": 2}}),
        (8, {"layers": 2, "micro_batch": 2, "pattern": "DA", "tokens": 512, "data_ranks": 2,
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
    always = ["train.compile=false", "run.device=cpu", "parallel.engine=fsdp"]
    config = complete(load_config(PlanConfig, find_recipe(Path(recipe)), [*words.split(), *always]))
    world = config.cluster.ranks
    expected = defaultdict[str, float](float)
    for one in traffic.collectives(config):
        expected[one.kind] += one.input_bytes
    whole = peak_moment(config, world).total
    settings = {name: getattr(config, name).model_dump(mode="json") for name in settings_of()}
    first, last = executed(settings, world, [0, world - 1])
    assert expected.keys() <= first.sent.keys() == last.sent.keys()
    for kind in first.sent:
        sizes = first.sent[kind][1], last.sent[kind][1]  # equal, but in all-to-alls with other rows on each rank
        assert min(sizes) - FEW_NUMBERS <= expected[kind] <= max(sizes)
    for one in (first, last):
        assert one.peak == pytest.approx(whole, rel=0.01)
