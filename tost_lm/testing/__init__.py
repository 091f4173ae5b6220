"""Helpers for tests of distributed code, shipped so that users can test theirs."""

from tost_lm.testing.ranks import run_on_ranks

__all__ = ["run_on_ranks"]
