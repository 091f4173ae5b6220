"""Plugins of the experiments."""

from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import pytest

from tost_lm.mixers.registry import SPECS


def registered(name: str, spec: str, layer: str) -> Iterator[ModuleType]:
    """A plugin, registered for one test."""
    module = import_module(f"experiments.{name}")  # the first import registers it
    letter = getattr(module, spec).letter
    SPECS.pop(letter, None)  # perhaps of a recipe's file, under a name that no other process can import
    module.register(getattr(module, spec)(), getattr(module, layer))
    yield module
    del SPECS[letter]


@pytest.fixture
def convolution() -> Iterator[ModuleType]:
    yield from registered("comparison.convolution", "ConvolutionSpec", "GatedConvolution")


@pytest.fixture
def convolved_keys() -> Iterator[ModuleType]:
    yield from registered("comparison.convolved_keys", "ConvolvedKeysSpec", "ConvolvedKeys")
