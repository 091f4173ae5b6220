"""The image classifier: published sizes, initial values, stochastic depth, and messages.

`tests/unit/experiments/test_released_vision.py` compares logits and gradients with the released formulas.
"""

from typing import Any

import pytest
import torch

from experiments.vision.classifier import TostVision
from experiments.vision.settings import VisionConfig
from tost_lm.config import validate
from tost_lm.errors import ConfigError

SIZES = {"layers": 3, "heads": 2, "width": 16, "classes": 5}


def config_of(**settings: Any) -> VisionConfig:
    return validate(VisionConfig, {**SIZES, **settings}, "test")


@pytest.mark.parametrize(
    ("preset", "millions"),
    [
        ("tost-vision-tiny-12", 5.77), ("tost-vision-small-12", 22.59), ("tost-vision-tiny-24", 10.22),
        ("tost-vision-small-24", 40.34), ("tost-vision-medium-24", 71.48), ("tost-vision-large-24", 160.29),
    ],
)  # fmt: skip
def test_presets_have_the_parameters_of_the_released_models(preset: str, millions: float):
    with torch.device("meta"):
        model = TostVision(validate(VisionConfig, {"preset": preset}, "test"))
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 2) == millions
    assert model.config.layer_scale == (1.0 if preset.endswith("12") else 1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 12}, "model.width 12 is not a multiple of 8, half of model.patch_size"),
        ({"heads": 3}, "model.width 16 is not divisible by model.heads 3; change one of them"),
        ({"patch_size": 4}, "patch_size: input should be 8 or 16, got 4"),
        ({"preset": "tost-vision-medium-12"}, "preset: input should be 'tost-vision-tiny-12', "),
    ],
)
def test_settings_that_do_not_fit_are_named(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        config_of(**settings)


def test_images_that_do_not_fit_are_named():
    with pytest.raises(ConfigError, match=r"images must be \[B, 3, height, width\], got \[2, 1, 28, 28\]; convert"):
        TostVision(config_of())(torch.zeros(2, 1, 28, 28))
