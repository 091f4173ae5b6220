"""The measurements of benchmarks.generation."""

import pytest

from benchmarks.generation import generation

SETTINGS = {"layers": 1, "heads": 2, "width": 16, "vocab_size": 64, "pattern": "T", "max_positions": 8}


@pytest.mark.parametrize("rounds", [2, 0])
def test_a_token_s_time_is_its_own(rounds: int):
    cell = generation(device="cpu", model=SETTINGS, lengths=[1, 4, 8], rounds=rounds)
    assert list(cell["seconds"]) == list(cell["extra_bytes"]) == [1, 4, 8]
    assert min(cell["seconds"].values()) > 0
    assert {length: len(seconds) for length, seconds in cell["prefix_seconds"].items()} == (
        {1: 2, 4: 2, 8: 2} if rounds else {}
    )
    assert cell["state_bytes"] == (2 * 16 + 2) * 8 + 8
