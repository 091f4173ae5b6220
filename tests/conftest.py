"""Environment of all tests, what `-m quick` imports, time budgets, the reasons of skipped tests, and recorded runs."""

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# Defaults that must be set before torch is imported; the processes that tests start inherit them.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # test workers share the cores
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads slow down the other processes
# Only tests/gpu sees GPUs: the others compare CPU ranks and kernels. Workers inherit this.
if "PYTEST_XDIST_WORKER" not in os.environ and not any("tests/gpu" in word for word in sys.argv):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
import torch
from shared_data import MISSING

from tost_lm.version import git_commit

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it

IN_CI = os.environ.get("CI", "").lower() not in ("", "0", "false", "no")
FAULTS = pytest.StashKey[list[tuple[str, int, str]]]()

_started = time.monotonic()
_durations: list[tuple[float, str]] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the slow tests, and inject each fault several times")
    parser.addoption(
        "--budget", type=float, metavar="MINUTES", help="on 2 quiet cores; printed, and CI fails beyond twice as much"
    )
    parser.addoption("--record", metavar="FILE", help="keep the results of each test file there")
    parser.addoption("--missing", metavar="FILE", help=f"append the names of tests that are skipped since {MISSING}")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FAULTS] = []


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m quick` imports only files that have a quick test: importing all takes a minute."""
    if config.option.markexpr == "quick" and collection_path.suffix == ".py":
        return "mark.quick" not in collection_path.read_text() or None
    return None


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
    if (file := config.getoption("--missing")) and not hasattr(config, "workerinput"):
        skipped = terminalreporter.getreports("skipped")
        names = [report.nodeid for report in skipped if MISSING in report.longrepr[2]]
        with Path(file).open("a") as lines:
            lines.writelines(f"{name}\n" for name in names)
    if (file := config.getoption("--record")) and not hasattr(config, "workerinput"):
        _record(Path(file), terminalreporter)
    if budget := config.getoption("--budget"):
        write(f"{_minutes():.1f} minutes, budget {budget:g}")


def _record(path: Path, reporter: pytest.TerminalReporter) -> None:
    """Add the results of this run to those of the same commit; they replace those of an earlier one, file by file."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    run = {"date": datetime.now(UTC).date().isoformat(), "commit": git_commit(), "device": device}
    stored: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else {}
    fresh = {file: one for file, one in stored.items() if one["commit"] == run["commit"]}
    for outcome in ("passed", "failed", "skipped"):
        for report in reporter.getreports(outcome):
            if outcome == "passed" and report.when != "call":
                continue
            file = report.nodeid.partition("::")[0]
            counts = fresh.setdefault(file, {**run, "passed": 0, "failed": 0, "skipped": 0})
            counts[outcome] += 1
    path.write_text(json.dumps(dict(sorted((stored | fresh).items())), indent=1) + "\n")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    budget = session.config.getoption("--budget")
    if IN_CI and budget and _minutes() > 2 * budget and not hasattr(session.config, "workerinput"):
        print(f"\nCI: {_minutes():.1f} minutes are more than {2 * budget:g}, twice the budget; the slowest tests:")
        for seconds, name in sorted(_durations, reverse=True)[:10]:
            print(f"{seconds:7.1f} s  {name}")
        session.exitstatus = exitstatus or 1


def _minutes() -> float:
    return (time.monotonic() - _started) / 60
