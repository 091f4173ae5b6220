"""Test sets evaluated during training on every kind of parallel layout, in float32 and bfloat16."""

from pathlib import Path

import pytest
from test_evaluation_with_engine import assert_measured_as_one_process, folder

__all__ = ["folder"]  # the fixture


@pytest.mark.parametrize(
    ("layouts", "bfloat16"),
    [
        ([{"zero_stage": 3}], False),
        ([{"tensor": 2, "sequence": 2, "zero_stage": 1}, {"tensor": 2, "zero_stage": 3}], True),
    ],
)
def test_all_layouts_score_as_one_process(folder: Path, layouts: list[dict[str, int]], bfloat16: bool):
    assert_measured_as_one_process(layouts, folder, bfloat16)
