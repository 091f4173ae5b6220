"""The rows of docs/guarantees.md name tests that exist, are quick, and have the stated tolerances."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS_FOLDER = Path(__file__).parents[2]
CHECKOUT = TESTS_FOLDER.parent


def guarantees() -> Iterator[tuple[str, list[Path]]]:
    """The rows of docs/guarantees.md, each with the files and folders that it names."""
    homes = {path.name: path for path in TESTS_FOLDER.rglob("test_*.py")}
    _, *rows = [line for line in (CHECKOUT / "docs/guarantees.md").read_text().splitlines() if line.startswith("| ")]
    named: list[Path] = []
    for row in rows:
        guarantee, tests, *_ = row.strip("| ").split(" | ")
        earlier = named if tests.startswith("same") else []
        names = re.findall(r"`([^`]+)`", tests)
        named = earlier + [homes[Path(name).name] if name.endswith(".py") else CHECKOUT / name for name in names]
        yield guarantee, named


@pytest.mark.quick
def test_every_guarantee_has_a_quick_test():
    """One of the tests that a row names, unless all of them take minutes."""
    quick = [path for path in TESTS_FOLDER.rglob("test_*.py") if "mark.quick" in path.read_text()]
    for guarantee, named in guarantees():
        found = any(path == test or path in test.parents for path in named for test in quick)
        assert found or all(TESTS_FOLDER / "full" in (path, *path.parents) for path in named), guarantee


def test_every_tolerance_of_a_guarantee_is_one_of_its_tests():
    for guarantee, named in guarantees():
        files = [file for path in named for file in ([path] if path.is_file() else path.rglob("test_*.py"))]
        code = "".join(file.read_text() for file in files)
        for tolerance in re.findall(r"1e-\d+", guarantee):
            assert tolerance in code, (guarantee, tolerance)
