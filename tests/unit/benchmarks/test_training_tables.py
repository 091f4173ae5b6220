"""The tables of benchmarks.training."""

import pytest
import torch

from benchmarks.measure import markdown_table
from benchmarks.plain import plain_loss
from benchmarks.training import (
    COMPILED,
    LOOP,
    OURS,
    PLAIN,
    PLAIN_COMPILED,
    WITHOUT,
    TrainingBenchmarkConfig,
    engine_text,
    step_row,
)
from tost_lm.config import validate
from tost_lm.model import ModelConfig
from tost_lm.pretrain.tiled import TiledLM
from tost_lm.testing import FLOAT32_REORDERED, assert_close

SHAPE = {"layers": 2, "heads": 4, "width": 256, "vocab_size": 256, "tokens": 1000}


def test_ratios_are_medians_of_the_rounds_own():
    seconds = {
        OURS: [1.0, 2.0, 4.0], COMPILED: [1.0, 1.0, 1.0], LOOP: [0.8, 2.0, 5.0], PLAIN: [3.0, 6.4, 5.0],
        PLAIN_COMPILED: [1.5, 3.2, 5.0], WITHOUT: [1.0, 1.6, 2.0],
    }  # fmt: skip
    close = {OURS: [0.9, 1.0, 1.1, 1.0, 1.2, 1.1, 1.1], LOOP: [1.0] * 7, WITHOUT: [0.5] * 7}
    row = step_row({**SHAPE, "seconds": seconds, "close": close})
    assert row[f"{OURS}, tokens/s"] == "500"
    assert row["cost of DeepSpeed"] == "+10.0% (-10.0% to +20.0%, 7 rounds)"
    assert row["cost of DeepSpeed and the operator"] == "+120.0% (+80.0% to +140.0%, 7 rounds)"
    assert (row[OURS], row[COMPILED], row[PLAIN], row[WITHOUT]) == ("1.50", "3.20", "0.50", "2.00")
    failed = step_row({**SHAPE, "failed": "out of memory"})
    assert failed[f"{OURS}, tokens/s"] == "out of memory"
    assert "out of memory" in markdown_table([row, failed])


def test_one_setting_of_a_shape_leaves_its_others():
    config = validate(TrainingBenchmarkConfig, {"large": {"tokens": 10}}, "test")
    assert (config.large.tokens, config.large.width) == (10, TrainingBenchmarkConfig().large.width)
    assert config.long == TrainingBenchmarkConfig().long


def test_the_engine_is_described_by_fractions_of_a_step():
    engine = {
        "step_seconds": [10.0, 10.0, 11.0],
        "checksum_seconds": [0.1, 0.1, 0.3],
        "other_seconds": [0.02, 0.01, 0.02],
        "save_seconds": [2.0, 2.5, 3.0],
        "write_seconds": [4.0, 6.0],
        "steps_while_writing": [10.5],
        "checkpoint_bytes": 1_500_000_000,
    }
    text = engine_text(engine)
    assert text.startswith("Of a step of 10.00 s, the engine adds 1.2%: checksums 1.00%, hooks and reading 0.20%.")
    assert "An async save of 1.50 GB stops training for 2.50 s, 0.25 steps, and is on disk 6.0 s" in text
    assert text.endswith("the steps meanwhile take +5%.")
    all_beside = engine_text({**engine, "step_seconds": [], "steps_while_writing": [5.0]})
    assert all_beside.startswith("Of a step of 5.00 s")
    assert all_beside.endswith("6.0 s after its start.")
    assert engine_text({"failed": "over 5 s"}) == "failed: over 5 s"


@pytest.mark.parametrize(("pattern", "relative"), [("T", 1e-12), ("TA", 1e-12), ("TD", FLOAT32_REORDERED)])
def test_the_plain_formulas_have_the_loss_of_the_model(pattern: str, relative: float):
    """The formula of the delta rule, in fla-core, is computed in float32."""
    torch.manual_seed(0)
    shape = {"layers": 2, "heads": 2, "width": 8, "vocab_size": 16, "max_positions": 12, "layer_scale": 1.0}
    model = TiledLM(ModelConfig(pattern=pattern, **shape)).double()  # pyright: ignore[reportArgumentType]
    torch.nn.init.normal_(model.get_parameter("blocks.0.mixer.denom_bias"))
    tokens_BT = torch.randint(16, (2, 12))
    assert_close(plain_loss(model, tokens_BT, tokens_BT), model(tokens_BT, labels=tokens_BT).loss, relative)
