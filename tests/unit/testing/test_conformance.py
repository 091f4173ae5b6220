"""The conformance harness: it finds every planted error by its kind."""

from collections.abc import Iterator
from typing import get_args

import pytest
from toy_mixer import REACH, Mutation, toy_config

from tost_lm.mixers.registry import SPECS
from tost_lm.testing.conformance import EQUALITIES, Report, check

LATER, STATE, SINGLE, DOCUMENTS, TILES, RANKS, SLOPES, WINDOW, NAN = EQUALITIES
FOUND_BY: dict[Mutation, set[str]] = {
    "later token visible": {LATER, STATE, SINGLE, TILES, NAN},
    "sum leaks across documents": {DOCUMENTS, TILES, NAN},
    "convolution starts again at a cut": {STATE, SINGLE, TILES},
    "gradient of the initial state too large": {STATE, SINGLE, TILES, SLOPES},
    "gradient of the decay too large": {SLOPES},
    "NaN spread by a triangular product": {NAN},
    "documents raise": {LATER, DOCUMENTS, TILES, SLOPES, NAN},
}
ON_RANKS = {"a rank ignored", "gradient to other ranks ignored"}
"""Found in tests/multiprocess/test_conformance_on_ranks.py."""


@pytest.fixture(autouse=True)
def only_here() -> Iterator[None]:
    yield
    SPECS.pop("Y", None)


def checked(mutation: Mutation | None = None, *, decays: bool = True, window: int | None = None) -> Report:
    return check("Y", toy_config(mutation=mutation, decays=decays, window=window), tokens=16)


def test_every_mutation_is_found_somewhere():
    assert set(get_args(Mutation)) == FOUND_BY.keys() | ON_RANKS


def test_the_toy_mixer_conforms():
    report = checked()
    assert report.with_result("fails") == []
    assert report.with_result("not offered") == [RANKS, WINDOW]


@pytest.mark.parametrize("mutation", FOUND_BY)
def test_a_planted_error_is_found_by_its_kind(mutation: Mutation):
    report = checked(mutation)
    assert set(report.with_result("fails")) == FOUND_BY[mutation]
    if FOUND_BY[mutation] == {NAN}:  # of plugins, it is reported and not required
        report.require()
    else:
        with pytest.raises(AssertionError, match=r"Y:\n.*: .*\("):
            report.require()


@pytest.mark.parametrize(("window", "holds"), [(REACH - 1, False), (REACH, True), (REACH + 1, False)])
def test_a_window_has_its_exact_length(window: int, holds: bool):
    assert checked(decays=False, window=window).with_result("fails") == ([] if holds else [WINDOW])


def test_a_call_that_raises_fails_with_its_message():
    line = checked("documents raise").equalities[EQUALITIES.index(DOCUMENTS)]
    assert (line.result, line.reason) == ("fails", "NotImplementedError: are not supported")


def test_a_report_is_a_table():
    lines = str(checked("NaN spread by a triangular product")).splitlines()
    assert [line.count("|") for line in lines] == [6] * (2 + len(EQUALITIES))
    assert lines[-1].startswith(f"| {NAN} | fails | inf | 1e-10 | outputs with a NaN at token")
