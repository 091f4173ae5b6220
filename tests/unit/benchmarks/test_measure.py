"""The measuring tools: memory that is known is found, failures are distinguished, rivals take turns."""

import time

import pytest
import torch

from benchmarks import measure

MEGABYTE = 1 << 20


def run(limit_s: float = 60, **arguments: str) -> dict:
    return measure.run_cell("tests.unit.benchmarks.slow_or_failing:cell", device="cpu", limit_s=limit_s, **arguments)


def test_a_cell_is_a_fresh_process_that_returns_values():
    assert run(word="a “quoted” word") == {"device": "cpu", "word": "a “quoted” word"}


def test_failures_of_a_cell_are_distinguished():
    assert run(allocate="") == {"failed": "out of memory"}
    assert run(limit_s=0.5, sleep="") == {"failed": "over 0.5 s"}
    with pytest.raises(RuntimeError, match="KeyError: 'a defect'"):
        run(defect="")


def test_peak_memory_is_what_a_call_adds_at_most():
    def work() -> None:
        first = torch.ones(64 * MEGABYTE, dtype=torch.uint8)
        second = first + 1
        del first, second
        torch.ones(32 * MEGABYTE, dtype=torch.uint8)

    kept = torch.ones(256 * MEGABYTE, dtype=torch.uint8)
    work()
    assert measure.peak_extra_bytes(work, "cpu") / MEGABYTE == pytest.approx(128, rel=0.1)
    assert len(kept)


def test_rivals_take_turns_after_a_call_each():
    calls: list[str] = []
    seconds = measure.interleaved_seconds(
        {"a": lambda: calls.append("a"), "b": lambda: (calls.append("b"), time.sleep(0.01))}, "cpu", budget_s=60
    )
    assert calls[:2] == ["a", "b"]
    assert {tuple(calls[i : i + 2]) for i in range(2, 16, 2)} == {("a", "b"), ("b", "a")}
    assert [len(times) for times in seconds.values()] == [7, 7]
    assert min(seconds["b"]) >= 0.01 > min(seconds["a"])


def test_the_interval_of_a_median_is_that_of_the_tables():
    """Ranks of the sign test's 95 % interval."""
    assert measure.median_interval(range(30, 0, -1)) == (10, 21)
    assert measure.median_interval(range(1, 101)) == (40, 61)
    assert measure.median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
