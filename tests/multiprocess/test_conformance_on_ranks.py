"""The conformance harness on sequence ranks: every mixer equals one process, and ranks that ignore others are found."""

from typing import Any

import pytest
from layer_forms import LAYERS, config_of
from toy_mixer import Mutation, toy_config

from tost_lm.testing.conformance import EQUALITIES, check, rank_differences
from tost_lm.testing.conformance.subject import BOUND, Subject

RANKS = EQUALITIES[5]


@pytest.mark.parametrize("mutation", [None, "a rank ignored", "gradient to other ranks ignored"])
def test_a_rank_that_ignores_others_is_found(mutation: Mutation | None):
    report = check("Y", toy_config(mutation=mutation), ranks=True)
    assert report.with_result("fails") == ([] if mutation is None else [RANKS])


@pytest.mark.parametrize(
    ("letter", "settings"),
    [pytest.param(*case.values, id=case.id, marks=() if case.values[1] else pytest.mark.quick) for case in LAYERS],
)
def test_sequence_ranks_equal_one(letter: str, settings: dict[str, Any]):
    subject = Subject.of(letter, config_of(letter, settings))
    error, where = max(rank_differences(subject, T=24))
    assert error <= BOUND, where
