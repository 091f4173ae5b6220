"""Environment of all tests, the time budget of each tier, the reasons of skipped tests, and the table of faults."""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable

import pytest

# Defaults that must be set before torch is imported; the processes that tests start inherit them.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # test workers share the cores
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads slow down the other processes

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it

BUDGET_MINUTES = {"unit": 4, "multiprocess": 5, "faults": 3, "programs": 5}
"""Per tier, on 2 quiet cores. Printed; CI fails beyond twice as much."""
IN_CI = os.environ.get("CI", "").lower() not in ("", "0", "false", "no")
FAULTS = pytest.StashKey[list[tuple[str, int, str]]]()

_started = time.monotonic()
_durations: list[tuple[float, str]] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="inject faults as often as the table in docs/faults.md says")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FAULTS] = []


@pytest.fixture(scope="session")
def in_ci() -> bool:
    return IN_CI


@pytest.fixture
def times(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """How often to inject a fault: twice, or with --full the number given."""
    return lambda full: full if request.config.getoption("--full") else 2


@pytest.fixture
def record_fault(request: pytest.FixtureRequest) -> Callable[[str, int, str], None]:
    """Add a row to the table: a fault, how often it was injected, and the result."""
    return lambda fault, count, result: request.config.stash[FAULTS].append((fault, count, result))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _durations.append((report.duration, report.nodeid))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    write = terminalreporter.write_line
    if rows := config.stash[FAULTS]:
        write("| fault | times | result |\n|---|---|---|")
        for fault, count, result in rows:
            write(f"| {fault} | {count} | {result} |")
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.getreports("skipped"))
    for reason, count in reasons.items():
        write(f"{count} skipped: {reason}")
    if tiers := _budgeted_tiers(config):
        write(f"{', '.join(tiers)}: {_minutes():.1f} minutes, budget {sum(tiers.values())}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    limit = 2 * sum(_budgeted_tiers(session.config).values())
    if IN_CI and limit and _minutes() > limit:
        print(f"\nCI: {_minutes():.1f} minutes are more than {limit}, twice the budget; the slowest tests:")
        for seconds, name in sorted(_durations, reverse=True)[:10]:
            print(f"{seconds:7.1f} s  {name}")
        session.exitstatus = exitstatus or 1


def _budgeted_tiers(config: pytest.Config) -> dict[str, float]:
    """The tiers that ran, with their budgets; none in a worker, which sees only some tests, or with --full."""
    if hasattr(config, "workerinput") or config.getoption("--full"):
        return {}
    tiers = {name.split("/")[1] for _, name in _durations}
    return {tier: BUDGET_MINUTES[tier] for tier in sorted(tiers & BUDGET_MINUTES.keys())}


def _minutes() -> float:
    return (time.monotonic() - _started) / 60
