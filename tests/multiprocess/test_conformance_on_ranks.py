"""The conformance harness on sequence ranks: our layers equal one process, and ranks that ignore others are found."""

from typing import Any

import pytest
from toy_mixer import Mutation, rank_shard, toy_adapter

from tost_lm.model import ModelConfig
from tost_lm.testing.conformance import EQUALITIES, check, layer_adapter

RANKS = EQUALITIES[5]


@pytest.mark.parametrize("mutation", [None, "a rank ignored", "gradient to other ranks ignored"])
def test_a_rank_that_ignores_others_is_found(mutation: Mutation | None):
    report = check(toy_adapter(mutation, shard=rank_shard))
    assert report.with_result("fails") == ([] if mutation is None else [RANKS])


@pytest.mark.quick
@pytest.mark.parametrize(
    ("letter", "settings"),
    [
        ("T", {}),
        ("T", {"tssa": {"membership": "energy-mean", "denom_bias": "head"}}),
        ("A", {"softmax": {"window": 5}}),
        ("A", {}),
        ("D", {}),
    ],
)  # fmt: skip
def test_sequence_ranks_equal_one(letter: str, settings: dict[str, Any]):
    config = ModelConfig(pattern=letter, layers=1, heads=2, width=8, max_positions=40, **settings)
    report = check(layer_adapter(letter, config, rank_shard))
    (line,) = (equality for equality in report.equalities if equality.name == RANKS)
    assert line.result == "holds", line
