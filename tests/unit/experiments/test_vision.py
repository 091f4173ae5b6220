"""Published sizes of the image classifiers.

`tests/unit/experiments/test_released_vision.py` compares logits and gradients with the released formulas.
"""

import pytest
import torch

from experiments.vision.classifier import TostVision
from experiments.vision.settings import VisionConfig
from tost_lm.config import validate


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
