"""The model in plain formulas that benchmarks.training measures."""

import pytest
import torch
from fla_core import fla_core

from benchmarks.plain import plain_loss
from tost_lm.model import ModelConfig
from tost_lm.pretrain.tiled import TiledLM
from tost_lm.testing import FLOAT32_REORDERED, assert_close


@pytest.mark.parametrize(("pattern", "relative"), [("T", 1e-12), ("TA", 1e-12), ("TD", FLOAT32_REORDERED)])
def test_the_plain_formulas_have_the_loss_of_the_model(pattern: str, relative: float):
    """The formula of the delta rule, in fla-core, is computed in float32."""
    if "D" in pattern:
        fla_core()
    torch.manual_seed(0)
    shape = {"layers": 2, "heads": 2, "width": 8, "vocab_size": 16, "max_positions": 12, "layer_scale": 1.0}
    model = TiledLM(ModelConfig(pattern=pattern, **shape)).double()  # pyright: ignore[reportArgumentType]
    torch.nn.init.normal_(model.get_parameter("blocks.0.mixer.denom_bias"))
    tokens_BT = torch.randint(16, (2, 12))
    assert_close(plain_loss(model, tokens_BT, tokens_BT), model(tokens_BT, labels=tokens_BT).loss, relative)
