"""The image classifier: published sizes, initial values, stochastic depth, and messages.

`tests/unit/extra/vision/test_released_vision.py` compares logits and gradients with the released formulas.
"""

from typing import Any

import pytest
import torch

from tost_lm.config import validate
from tost_lm.errors import ConfigError
from tost_lm.extra.vision.classifier import TostVision
from tost_lm.extra.vision.settings import VisionConfig

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


def test_weights_are_drawn_as_released_and_not_on_the_meta_device():
    def draw(seed: int) -> TostVision:
        torch.manual_seed(seed)
        return TostVision(config_of(width=64, classes=300, layer_scale=1e-5))

    model, same, other = draw(0).state_dict(), draw(0).state_dict(), draw(1).state_dict()
    assert all(torch.equal(model[name], same[name]) for name in model)
    assert not torch.equal(model["head.weight"], other["head.weight"])
    normal = [n for n, w in model.items() if n == "class_token" or (w.dim() == 2 and n != "positions.weight")]
    drawn = torch.cat([model[name].flatten() for name in normal])
    # The standard error of a standard deviation of n draws is its value / √(2n).
    assert abs(drawn.std().item() / 0.02 - 1) < 5 / (2 * len(drawn)) ** 0.5
    uniform = {"positions.weight": 64, "embedding.convolutions.3.weight": 32 * 9}
    for name, inputs in uniform.items():
        assert 0.95 < model[name].abs().max() * inputs**0.5 <= 1, name
    constants = {"temp": 1.0, "gamma": 1e-5, "norm.weight": 1.0, "running_var": 1.0, "running_mean": 0.0}
    for name, weight in model.items():
        wanted = [value for end, value in constants.items() if name.endswith(end)]
        if name.endswith("bias") and name != "positions.bias":
            wanted = [0.0]
        assert all((weight == value).all() for value in wanted), name
    with torch.device("meta"):
        before = torch.get_rng_state()
        assert all(weight.is_meta for weight in TostVision(config_of()).state_dict().values())
        assert torch.equal(torch.get_rng_state(), before)


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
