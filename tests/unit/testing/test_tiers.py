"""Time budgets, skip reasons, environment and marked tests, as tests/conftest.py handles them, in runs of pytest."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS_FOLDER = Path(__file__).parents[2]
CHECKOUT = TESTS_FOLDER.parent
TESTS = """
import os, time, pytest

@pytest.mark.parametrize("number", [1, 2])
def test_skipped(number):
    pytest.skip("no such device")

def test_environment():
    assert (os.environ["OMP_NUM_THREADS"], os.environ["OMP_WAIT_POLICY"]) == {expected}
"""


def run_tier(
    folder: Path, budget_minutes: float, expected: tuple[str, str], *options: str, **environment: str
) -> tuple[int, str]:
    """Exit code and output of a pytest run on a tier with such a budget."""
    (folder / "tests/unit").mkdir(parents=True, exist_ok=True)
    for name in ("conftest.py", "shared_data.py"):
        shutil.copy(TESTS_FOLDER / name, folder / "tests")
    (folder / "tests/unit/test_it.py").write_text(TESTS.format(expected=expected))
    inherited = {k: v for k, v in os.environ.items() if k != "CI" and not k.startswith(("OMP_", "PYTEST_"))}
    words = ["-q", "-o", "pythonpath=tests", f"--budget={budget_minutes}", *options, "tests"]
    command = [sys.executable, "-m", "pytest", *words]
    done = subprocess.run(command, cwd=folder, env={**inherited, **environment}, capture_output=True, text=True)
    return done.returncode, done.stdout


@pytest.mark.parametrize(("environment", "code"), [({}, 0), ({"CI": "false"}, 0), ({"CI": "true"}, 1)])
def test_only_ci_fails_beyond_the_budget(environment: dict[str, str], code: int, tmp_path: Path):
    found, out = run_tier(tmp_path, 1e-6, ("1", "passive"), **environment)
    assert found == code, out
    assert "budget 1e-06" in out
    assert ("twice the budget; the slowest tests:" in out) == (code == 1)


def test_skipped_tests_are_counted_by_reason_and_the_users_environment_is_kept(tmp_path: Path):
    code, out = run_tier(tmp_path, 5, ("2", "active"), CI="1", OMP_NUM_THREADS="2", OMP_WAIT_POLICY="active")
    assert code == 0, out
    assert "2 skipped: no such device\n" in out
    assert "0.0 minutes, budget 5" in out


def test_only_files_with_a_quick_test_are_imported(tmp_path: Path):
    for folder, mark in (("unit", "quick"), ("full", "slow")):
        (tmp_path / "tests" / folder).mkdir(parents=True)
        test = f"import pytest\n\n@pytest.mark.{mark}\ndef test_of_{folder}():\n    pass\n"
        (tmp_path / f"tests/{folder}/test_{mark}.py").write_text(test)
    (tmp_path / "tests/full/test_slow.py").open("a").write("\nraise ImportError\n")
    code, out = run_tier(tmp_path, 5, ("1", "passive"), "-vv", "-m", "quick")
    assert code == 0, out
    assert "test_of_unit PASSED" in out
    assert "deselected" not in out


def test_tests_without_the_files_beside_the_checkout_are_listed(tmp_path: Path):
    (tmp_path / "tests/unit").mkdir(parents=True)
    (tmp_path / "tests/unit/test_others.py").write_text(
        "from shared_data import needs_shared\n\n@needs_shared\ndef test_text():\n    pass\n"
    )
    code, out = run_tier(tmp_path, 5, ("1", "passive"), f"--missing={tmp_path / 'missing'}")
    assert code == 0, out
    assert (tmp_path / "missing").read_text() == "tests/unit/test_others.py::test_text\n"


def guarantees() -> Iterator[tuple[str, list[Path]]]:
    """The rows of docs/guarantees.md, each with the files and folders that it names."""
    homes = {path.name: path for path in TESTS_FOLDER.rglob("test_*.py")}
    _, *rows = [line for line in (CHECKOUT / "docs/guarantees.md").read_text().splitlines() if line.startswith("| ")]
    named: list[Path] = []
    for row in rows:
        guarantee, tests = row.strip("| ").rsplit(" | ", 1)
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
