"""Ranks that do not agree all end with the same lines, and those name the odd ones."""

import socket
from typing import Any

import pytest
import torch.distributed as dist

from tost_lm.config import validate
from tost_lm.errors import ConfigError
from tost_lm.optim.settings import OptimConfig
from tost_lm.parallel.agreement import all_gather_object, name_ranks, require_agreement, settings_as_facts
from tost_lm.testing import run_on_ranks

pytestmark = pytest.mark.quick

HOST = socket.gethostname()


def refusals(cases: list[list[dict[str, str]]]) -> list[list[str]]:
    """The lines with which this rank refuses each case: facts of all ranks."""
    found = []
    for facts_of_ranks in cases:
        try:
            require_agreement(facts_of_ranks[dist.get_rank()], "start all alike")
            found.append([])
        except ConfigError as error:
            found.append(str(error).splitlines())
    return found


def gather_own(values: list[Any]) -> list[Any]:
    return all_gather_object(values[dist.get_rank()])


def test_every_rank_names_the_odd_ones():
    same, settings = {"shards": "9f8e", "torch": "2.13"}, [0.02, 0.01, 0.02, 0.02]
    expected = [
        ([same] * 4, []),
        (
            [same, same, {"shards": "1a2b", "torch": "2.13"}, {"shards": "9f8e"}],
            [
                f"shards differs between ranks: 1a2b on rank 2 ({HOST}), 9f8e on the other 3 ranks; start all alike",
                f"torch differs between ranks: missing on rank 3 ({HOST}), 2.13 on the other 3 ranks; start all alike",
            ],
        ),
        (
            [{"a": "x"}, {"a": "y"}, {"a": "y"}, {"a": "z", "b": "ü"}],
            [
                f"a differs between ranks: x on rank 0 ({HOST}), z on rank 3 ({HOST}), y on the other 2 ranks; "
                "start all alike",
                f"b differs between ranks: ü on rank 3 ({HOST}), missing on the other 3 ranks; start all alike",
            ],
        ),
        (
            [settings_as_facts(validate(OptimConfig, {"lr": lr}, "test")) for lr in settings],
            [f"lr differs between ranks: 0.01 on rank 1 ({HOST}), 0.02 on the other 3 ranks; start all alike"],
        ),
    ]
    facts, lines = zip(*expected, strict=True)
    assert run_on_ranks(refusals, 4, list(facts)) == [list(lines)] * 4


def test_what_ranks_say_arrives_whole_whatever_its_length():
    values = [None, "\ud800 é" * 999, {"list": [1, 2.5, True]}]
    assert run_on_ranks(gather_own, 3, values) == [values] * 3


def test_many_ranks_are_named_in_few_words():
    hosts = ["a"] * 4 + ["b"] * 4
    assert name_ranks([1, 2, 3, 5, 7], hosts) == "ranks 1-3 (a), ranks 5, 7 (b)"
    assert name_ranks([0], hosts) == "rank 0 (a)"
