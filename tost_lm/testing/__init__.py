"""Helpers for tests of distributed and numeric code, shipped so that users can test theirs."""

from tost_lm.testing.compare import FLOAT32_REORDERED, assert_as_accurate, assert_close
from tost_lm.testing.ranks import run_on_ranks
from tost_lm.testing.traffic import Traffic

__all__ = ["FLOAT32_REORDERED", "Traffic", "assert_as_accurate", "assert_close", "run_on_ranks"]
