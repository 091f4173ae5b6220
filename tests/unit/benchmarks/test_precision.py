"""bfloat16 keeps what blocks with a small LayerScale add."""

import pytest

from benchmarks import precision
from benchmarks.precision import hidden_errors


@pytest.mark.parametrize("pattern", ["T", "TA"])
def test_the_last_hidden_state_in_bfloat16_is_that_of_float32(pattern: str):
    model = {"layers": 6, "heads": 4, "width": 128, "vocab_size": 256, "max_positions": 128, "pattern": pattern}
    errors = hidden_errors("cpu", model, [1e-5, 1e-4, 1e-3, 1e-2], 128)
    assert [row["layer_scale"] for row in errors["rows"]] == [1e-5, 1e-4, 1e-3, 1e-2]
    assert max(row["error"] for row in errors["rows"]) <= precision.ERROR_LIMIT
