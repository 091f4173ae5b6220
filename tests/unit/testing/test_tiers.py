"""Time budgets, skip reasons and environment that tests/conftest.py sets, in a pytest run of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[2] / "conftest.py"
TESTS = """
import os, time, pytest

@pytest.mark.parametrize("number", [1, 2])
def test_skipped(number):
    pytest.skip("no such device")

def test_environment():
    assert (os.environ["OMP_NUM_THREADS"], os.environ["OMP_WAIT_POLICY"]) == {expected}
"""


def run_tier(folder: Path, budget_minutes: float, expected: tuple[str, str], **environment: str) -> tuple[int, str]:
    """Exit code and output of a pytest run on a tier with such a budget."""
    (folder / "tests/unit").mkdir(parents=True)
    (folder / "tests/conftest.py").write_text(CONFTEST.read_text() + f"\nBUDGET_MINUTES['unit'] = {budget_minutes}\n")
    (folder / "tests/unit/test_it.py").write_text(TESTS.format(expected=expected))
    inherited = {k: v for k, v in os.environ.items() if k != "CI" and not k.startswith(("OMP_", "PYTEST_"))}
    command = [sys.executable, "-m", "pytest", "-q", "tests"]
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
    assert "unit: 0.0 minutes, budget 5" in out
