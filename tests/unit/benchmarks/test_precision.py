"""bfloat16 keeps what blocks with a small LayerScale add; the tables say whether the limits are met."""

import pytest

from benchmarks import precision
from benchmarks.precision import hidden_errors


@pytest.mark.parametrize("pattern", ["T", "TA"])
def test_the_last_hidden_state_in_bfloat16_is_that_of_float32(pattern: str):
    model = {"layers": 6, "heads": 4, "width": 128, "vocab_size": 256, "max_positions": 128, "pattern": pattern}
    errors = hidden_errors("cpu", model, [1e-5, 1e-4, 1e-3, 1e-2], 128)
    assert [row["layer_scale"] for row in errors["rows"]] == [1e-5, 1e-4, 1e-3, 1e-2]
    assert max(row["error"] for row in errors["rows"]) <= precision.ERROR_LIMIT


def test_a_difference_of_losses_has_its_error_and_verdict():
    pairs = [
        {"dtype": dtype, "losses": [loss], "state_bytes": 1, "seconds": 1.0}
        for dtype, loss in (("float32", 1.0), ("bfloat16", 1.01), ("float32", 1.0), ("bfloat16", 1.03))
    ]
    text = precision.loss_text(pairs, 1)
    assert "+0.0200 ± 0.0100" in text
    assert "Difference at the end 2.00% of the loss; limit 1%: not met" in text
