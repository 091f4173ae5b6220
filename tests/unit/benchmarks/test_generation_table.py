"""The table of benchmarks.generation."""

import pytest

from benchmarks.generation import generation, table

SETTINGS = {"layers": 1, "heads": 2, "width": 16, "vocab_size": 64, "pattern": "T", "max_positions": 8}


def test_times_are_summed_between_the_lengths():
    cell = {"prefix_seconds": {"1": [1.0], "2": [2.0, 9.0, 3.0], "4": [5.0]}, "seconds": {"1": 0.5, "2": 0.5, "4": 4}}
    text = table({**cell, "state_bytes": 10}, {"extra_bytes": {"1": 0, "2": 1_500_000, "4": 0}})
    rows = [[part.strip() for part in line.split("|")[1:-1]] for line in text.splitlines()[2:4]]
    assert rows == [["2", "500.0 ms", "3000 ms", "1.5 MB"], ["4", "2000.0 ms", "5000 ms", "0.0 MB"]]
    assert text.endswith(  # (1 + 3) / 2 and 2 · (3 + 5) / 2
        "All 4 tokens: 5.0 s from the state, 10 s by reading all again: 2.0 times as fast. The state: 10 bytes."
    )
    assert table({"failed": "over 1 s"}, {}) == "over 1 s"


@pytest.mark.parametrize("rounds", [2, 0])
def test_a_token_s_time_is_its_own(rounds: int):
    cell = generation(device="cpu", model=SETTINGS, lengths=[1, 4, 8], rounds=rounds)
    assert list(cell["seconds"]) == list(cell["extra_bytes"]) == [1, 4, 8]
    assert min(cell["seconds"].values()) > 0
    assert {length: len(seconds) for length, seconds in cell["prefix_seconds"].items()} == (
        {1: 2, 4: 2, 8: 2} if rounds else {}
    )
    assert cell["state_bytes"] == (2 * 16 + 2) * 8 + 8
