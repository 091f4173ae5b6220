"""Names of test files."""

from collections import Counter
from pathlib import Path


def test_no_two_files_have_one_name():
    """pytest imports test files by their names, and fails only when both are collected."""
    found = Counter(path.name for path in Path(__file__).parents[1].rglob("test_*.py"))
    assert [name for name, count in found.items() if count > 1] == []
