"""Plugins of the experiments, and tiny float64 models with different layers."""

from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import pytest
import torch

from tost_lm.config import validate
from tost_lm.mixers.registry import SPECS
from tost_lm.model import ModelConfig, TostLM


def registered(name: str, spec: str, layer: str) -> Iterator[ModuleType]:
    """A plugin, registered for one test."""
    module = import_module(f"experiments.{name}")  # the first import registers it
    letter = getattr(module, spec).letter
    SPECS.pop(letter, None)  # perhaps of a recipe's file, under a name that no other process can import
    module.register(getattr(module, spec)(), getattr(module, layer))
    yield module
    del SPECS[letter]


@pytest.fixture
def slots() -> Iterator[ModuleType]:
    yield from registered("slots", "SlotsSpec", "SlotMixer")


@pytest.fixture
def convolution() -> Iterator[ModuleType]:
    yield from registered("comparison.convolution", "ConvolutionSpec", "GatedConvolution")


@pytest.fixture
def convolved_keys() -> Iterator[ModuleType]:
    yield from registered("comparison.convolved_keys", "ConvolvedKeysSpec", "ConvolvedKeys")


@pytest.fixture
def shifted_keys() -> Iterator[ModuleType]:
    yield from registered("comparison.shifted_keys", "ShiftedKeysSpec", "ShiftedKeys")


@pytest.fixture
def tssa_parts() -> Iterator[ModuleType]:
    yield from registered("comparison.tssa_parts", "PartsSpec", "TssaWithParts")


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
