"""bfloat16 keeps what blocks with a small LayerScale add; the tables say whether the limits are met."""

import sys

import pytest

from benchmarks import precision
from benchmarks.precision_cells import hidden_errors, losses
from tost_lm.config import load_config


@pytest.mark.parametrize("pattern", ["T", "TA"])
def test_the_last_hidden_state_in_bfloat16_is_that_of_float32(pattern: str):
    model = {"layers": 6, "heads": 4, "width": 128, "vocab_size": 256, "max_positions": 128, "pattern": pattern}
    errors = hidden_errors("cpu", model, [1e-5, 1e-4, 1e-3, 1e-2], 128)
    assert [row["layer_scale"] for row in errors["rows"]] == [1e-5, 1e-4, 1e-3, 1e-2]
    assert max(row["error"] for row in errors["rows"]) <= precision.ERROR_LIMIT


def test_tables_and_a_plain_loop_that_trains_as_deepspeed(monkeypatch: pytest.MonkeyPatch):
    settings = ["train.steps=4", "train.warmup_steps=1", "train.lr=1e-2", "train.seq_len=32", "train.batch=2"]
    settings += ["train.seeds=1", "shape.layers=1", "shape.heads=2", "shape.width=32", "layer_scales=[1e-4]"]
    config = load_config(precision.PrecisionBenchmarkConfig, None, settings)
    (_, *cells), text = precision.run(config, "cpu")
    assert "limit 2%: met" in text
    assert "limit 1%: met" in text
    assert "in bfloat16" in text

    monkeypatch.setitem(sys.modules, "deepspeed", None)
    for cell, (dtype, limit) in zip(cells, (("float32", 1e-6), ("bfloat16", 1e-3)), strict=True):
        train = {**config.train.model_dump(), "seed": 0, "dtype": dtype}
        plain = losses("cpu", precision.model_settings(config), train)
        assert plain["losses"][-1] < plain["losses"][0] - 0.05
        assert plain["losses"] == pytest.approx(cell["losses"], rel=limit)


def test_a_difference_of_losses_has_its_error_and_verdict():
    pairs = [
        {"dtype": dtype, "losses": [loss], "state_bytes": 1, "seconds": 1.0}
        for dtype, loss in (("float32", 1.0), ("bfloat16", 1.01), ("float32", 1.0), ("bfloat16", 1.03))
    ]
    text = precision.loss_text(pairs, 1)
    assert "+0.0200 ± 0.0100" in text
    assert "Difference at the end 2.00% of the loss; limit 1%: not met" in text
