"""Which parameters decay."""

import torch

from tost_lm.config import validate
from tost_lm.model import ModelConfig, TostLM
from tost_lm.optim.adamw import OPTIMIZER as ADAMW
from tost_lm.optim.settings import OptimConfig


def test_only_matrices_decay():
    settings = {"layers": 1, "heads": 2, "width": 8, "vocab_size": 11, "max_positions": 6, "bias": True}
    model = TostLM(validate(ModelConfig, settings, "test"))
    for p in model.parameters():
        torch.nn.init.ones_(p)
        p.grad = torch.zeros_like(p)
    ADAMW.build(model, OptimConfig(lr=0.5, weight_decay=0.1)).step()
    decayed = {name for name, p in model.named_parameters() if (p != 1).all()}
    kept = {name for name, p in model.named_parameters() if (p == 1).all()}
    assert decayed == {name for name, p in model.named_parameters() if p.dim() == 2 and "denom_bias" not in name}
    assert decayed | kept == {name for name, _ in model.named_parameters()}
