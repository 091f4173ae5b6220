"""Holds each tier of tests to its budget and shows the slowest tests of one that passed it."""

import time

import pytest

BUDGET_MINUTES = {"unit": 3, "multiprocess": 5, "faults": 4, "programs": 5}

_started = time.monotonic()
_durations: list[tuple[float, str]] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="cause faults as often as the table in docs/faults.md says")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _durations.append((report.duration, report.nodeid))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if hasattr(session.config, "workerinput"):
        return  # only the controller sees all tests
    tiers = {name.split("/")[1] for _, name in _durations}
    budget = sum(BUDGET_MINUTES.get(tier, 0) for tier in tiers)
    minutes = (time.monotonic() - _started) / 60
    if budget and minutes > budget:
        print(f"\n{', '.join(sorted(tiers))}: {minutes:.1f} minutes is past the budget of {budget}; the slowest:")
        for seconds, name in sorted(_durations, reverse=True)[:10]:
            print(f"{seconds:7.1f} s  {name}")
        session.exitstatus = exitstatus or 1
