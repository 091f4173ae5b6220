"""Tiny float64 models with different layers."""

import pytest
import torch

from tost_lm.config import validate
from tost_lm.model import ModelConfig, TostLM


@pytest.fixture
def make_model():
    def make(**settings) -> TostLM:
        small = {"layers": 2, "heads": 4, "width": 32, "vocab_size": 50, "max_positions": 64, "layer_scale": 0.5}
        torch.manual_seed(0)
        model = TostLM(validate(ModelConfig, {**small, **settings}, "test")).double().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "denom_bias" in name:
                    parameter.normal_(std=0.3)
                elif parameter.dim() == 2:
                    parameter.mul_(10)
                else:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        return model

    return make
