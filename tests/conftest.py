"""Holds each tier of tests to its budget, and prints the table of the faults that were caused."""

import time
from collections.abc import Callable

import pytest

BUDGET_MINUTES = {"unit": 5, "multiprocess": 7, "faults": 5, "programs": 5}

FAULTS = pytest.StashKey[list[tuple[str, int, str]]]()

_started = time.monotonic()
_durations: list[tuple[float, str]] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="cause faults as often as the table in docs/faults.md says")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FAULTS] = []


@pytest.fixture
def times(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """How often to cause a fault: 3 times, or as often as is given with --full."""
    return lambda full: full if request.config.getoption("--full") else 3


@pytest.fixture
def survived(request: pytest.FixtureRequest) -> Callable[[str, int, str], None]:
    """Note down for the table: a fault, how often it was caused, and what became of it."""
    return lambda fault, count, outcome: request.config.stash[FAULTS].append((fault, count, outcome))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if rows := config.stash[FAULTS]:
        terminalreporter.write_line("| fault | caused | what became of it |\n|---|---|---|")
        for fault, count, outcome in rows:
            terminalreporter.write_line(f"| {fault} | {count} | {outcome} |")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _durations.append((report.duration, report.nodeid))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if hasattr(session.config, "workerinput") or session.config.getoption("--full"):
        return  # only the controller sees all tests; full counts have no budget
    tiers = {name.split("/")[1] for _, name in _durations}
    budget = sum(BUDGET_MINUTES.get(tier, 0) for tier in tiers)
    minutes = (time.monotonic() - _started) / 60
    if budget and minutes > budget:
        print(f"\n{', '.join(sorted(tiers))}: {minutes:.1f} minutes is past the budget of {budget}; the slowest:")
        for seconds, name in sorted(_durations, reverse=True)[:10]:
            print(f"{seconds:7.1f} s  {name}")
        session.exitstatus = exitstatus or 1
