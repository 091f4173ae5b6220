"""Test sets measured on every kind of mix while training, in float32 and bfloat16; the suite has one of them."""

from pathlib import Path

import pytest
from test_evaluation_with_engine import assert_measured_as_one_process, folder

__all__ = ["folder"]  # the fixture


@pytest.mark.parametrize(
    ("mixes", "bfloat16"),
    [
        ([{"zero_stage": 3}], False),
        ([{"tensor": 2, "sequence": 2, "zero_stage": 1}, {"tensor": 2, "zero_stage": 3}], True),
    ],
)
def test_all_mixes_measure_what_one_process_does(folder: Path, mixes: list[dict[str, int]], bfloat16: bool):
    assert_measured_as_one_process(mixes, folder, bfloat16)
