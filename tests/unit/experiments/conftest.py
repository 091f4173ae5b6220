"""Plugins of the experiments, and tiny float64 models with different layers."""

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from tost_lm.config import validate
from tost_lm.mixers.registry import SPECS
from tost_lm.model import ModelConfig, TostLM


@pytest.fixture
def slots() -> Iterator[ModuleType]:
    """The plugin of slot memory, which other tests do not know."""
    from experiments import slots  # the first import registers it

    slots.register(slots.SlotsSpec(), slots.SlotMixer)
    yield slots
    del SPECS[slots.SlotsSpec.letter]


@pytest.fixture
def convolution() -> Iterator[ModuleType]:
    """The plugin of a gated convolution, registered for a test."""
    from experiments.comparison import convolution  # the first import registers it

    convolution.register(convolution.ConvolutionSpec(), convolution.GatedConvolution)
    yield convolution
    del SPECS[convolution.ConvolutionSpec.letter]


@pytest.fixture
def tssa_parts() -> Iterator[ModuleType]:
    """The plugin of TSSA with parts of other layers, registered for a test."""
    from experiments.comparison import tssa_parts  # the first import registers it

    tssa_parts.register(tssa_parts.PartsSpec(), tssa_parts.TssaWithParts)
    yield tssa_parts
    del SPECS[tssa_parts.PartsSpec.letter]


@pytest.fixture
def float64_model():
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
