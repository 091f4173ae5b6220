"""bfloat16 keeps what blocks with a small LayerScale add; the tables say whether the limits are met."""

import sys

import pytest

from benchmarks import precision
from benchmarks.measure import run_cell
from benchmarks.precision_cells import hidden_errors, losses
from tost_lm.config import load_config


@pytest.mark.parametrize("pattern", ["T", "TA"])
def test_the_last_hidden_state_in_bfloat16_is_that_of_float32(pattern: str):
    model = {"layers": 6, "heads": 4, "width": 128, "vocab_size": 256, "max_positions": 128, "pattern": pattern}
    errors = hidden_errors("cpu", model, [1e-5, 1e-4, 1e-3, 1e-2], 128)
    assert [row["layer_scale"] for row in errors["rows"]] == [1e-5, 1e-4, 1e-3, 1e-2]
    assert max(row["error"] for row in errors["rows"]) <= precision.ERROR_LIMIT


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-6), ("bfloat16", 1e-3)])
def test_the_plain_loop_trains_as_deepspeed(dtype: str, limit: float, monkeypatch: pytest.MonkeyPatch):
    model = {"layers": 1, "heads": 2, "width": 32, "vocab_size": 256, "max_positions": 32}
    train = {"steps": 4, "warmup_steps": 1, "lr": 1e-2, "seq_len": 32, "batch": 2, "seed": 1, "dtype": dtype}
    ours = run_cell("benchmarks.precision_cells:losses", device="cpu", limit_s=300, model=model, train=train)
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    plain = losses("cpu", model, train)
    assert plain["losses"][-1] < plain["losses"][0] - 0.05
    assert plain["losses"] == pytest.approx(ours["losses"], rel=limit)


def test_tables_and_limits():
    settings = ["train.steps=3", "train.seeds=1", "layer_scales=[1e-4]", "train.seq_len=16", "train.batch=1"]
    settings += ["shape.layers=1", "shape.heads=1", "shape.width=16"]
    _, text = precision.run(load_config(precision.PrecisionBenchmarkConfig, None, settings), "cpu")
    assert "limit 2%: met" in text
    assert "limit 1%: met" in text
    assert "in bfloat16" in text

    pairs = [
        {"dtype": dtype, "losses": [loss], "state_bytes": 1, "seconds": 1.0}
        for dtype, loss in (("float32", 1.0), ("bfloat16", 1.01), ("float32", 1.0), ("bfloat16", 1.03))
    ]
    text = precision.loss_text(pairs, 1)
    assert "+0.0200 ± 0.0100" in text
    assert "Difference at the end 2.00% of the loss; limit 1%: not met" in text
