"""Exchanges by all-to-alls on few ranks, as more than `ALL_GATHER_RANKS` ranks make them."""

from collections.abc import Callable
from typing import Any

from tost_lm.parallel import sequence


def by_all_to_alls(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)` on a rank of `run_on_ranks`."""
    sequence.ALL_GATHER_RANKS = 1
    return function(*arguments)
