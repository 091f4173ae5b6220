"""Helpers for tests of distributed code, shipped so that users can test theirs."""

from tost_lm.testing.compare import assert_close
from tost_lm.testing.ranks import run_on_ranks
from tost_lm.testing.traffic import Traffic

__all__ = ["Traffic", "assert_close", "run_on_ranks"]
