"""Checkpoints of the released vision code: equal logits and gradients, conversion in both directions, refused files."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import released_vision
import torch
from released_vision import Weights
from torch import Tensor

from experiments.vision.classifier import TostVision
from experiments.vision.released import from_released, load_vision, read_released, released_name, to_released
from experiments.vision.settings import VisionConfig
from tost_lm.config import validate
from tost_lm.errors import CheckpointError, ConfigError
from tost_lm.testing import assert_as_accurate, assert_close

pytestmark = pytest.mark.quick

SIZES = {"layers": 2, "heads": 2, "width": 16, "classes": 5}
CONVOLUTIONS = {16: 4, 8: 3}


def their_weights(patch_size: int = 16, dtype: torch.dtype = torch.float32) -> Weights:
    return released_vision.drawn(**SIZES, convolutions=CONVOLUTIONS[patch_size], dtype=dtype)


def model_of(weights: Weights, patch_size: int, dtype: torch.dtype) -> TostVision:
    model = TostVision(validate(VisionConfig, {**SIZES, "patch_size": patch_size}, "test")).to(dtype)
    model.load_state_dict({name: weights[released_name(name)].view_as(w) for name, w in model.state_dict().items()})
    return model


def images(dtype: torch.dtype) -> Tensor:
    """Images of 3 × 2 patches of 16 pixels; the last column and row are not whole."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, 3, 41, 26, generator=generator, dtype=torch.float64).to(dtype)


def logits_and_gradients(
    compute: Any, parameters: Mapping[str, Tensor], pull: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    logits = compute()
    gradients = torch.autograd.grad(logits, [*parameters.values()], pull.to(logits.dtype))
    return logits.detach(), dict(zip(parameters, gradients, strict=True))


def theirs(weights: Weights, dtype: torch.dtype, names: list[str], training: bool, pull: Tensor) -> Any:
    copies = {name: w.to(dtype) if w.is_floating_point() else w for name, w in weights.items()}
    trained = {name: copies[released_name(name)].requires_grad_() for name in names}
    return logits_and_gradients(lambda: released_vision.logits(copies, images(dtype), training), trained, pull)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("patch_size", [16, 8])
def test_logits_and_every_gradient_equal_the_released_formulas(patch_size: int, training: bool):
    weights, pull = their_weights(patch_size), torch.randn(3, 5, dtype=torch.float64)
    results = {}
    for dtype in (torch.float64, torch.float32):
        model = model_of(weights, patch_size, dtype).train(training)
        parameters = dict(model.named_parameters())
        ours = logits_and_gradients(lambda model=model, dtype=dtype: model(images(dtype)), parameters, pull)
        results[dtype] = ours, theirs(weights, dtype, [*parameters], training, pull)
    (ours, gradients), (truth, expected) = results[torch.float64]
    assert_close(ours, truth, 1e-10, "logits")
    (ours32, gradients32), (theirs32, expected32) = results[torch.float32]
    assert_close(ours32, truth, 1e-5, "logits")
    assert_as_accurate(ours32, theirs32, truth, "logits")
    for name in expected:
        mine, truth, mine32, theirs32 = (
            comparable(name, found[name]) for found in (gradients, expected, gradients32, expected32)
        )
        assert_close(mine, truth, 1e-10, name)
        assert_as_accurate(mine32, theirs32, truth, name)


def comparable(name: str, gradient: Tensor) -> Tensor:
    """A key bias adds the same to all scores of a query. So its gradient is zero up to rounding, and is left out."""
    if name.startswith("class_blocks.") and name.endswith(".in_proj.bias"):
        q, _, v = gradient.chunk(3)
        return torch.cat([q, v])
    return gradient.flatten()


def test_a_checkpoint_becomes_a_model_and_a_checkpoint_again_bit_for_bit(tmp_path: Path):
    weights, path = their_weights(), tmp_path / "theirs.pth"
    for stored in (
        weights,
        {"model": weights, "epoch": 399, "optimizer": {"state": {}, "param_groups": []}, "scaler": {}},
        {"model": {f"module.{name}": weight for name, weight in weights.items()}},
    ):
        torch.save(stored, path)
        config, ours = read_released(path)
        assert config.model_dump(include=set(SIZES)) == SIZES
        back = to_released(ours)["model"]
        assert back.keys() == weights.keys()
        for name, weight in weights.items():
            assert torch.equal(back[name], weight), name
            assert back[name].dtype == weight.dtype
    model = load_vision(path)
    assert not model.training
    with torch.no_grad():
        assert_close(model(images(torch.float32)), released_vision.logits(weights, images(torch.float32)), 1e-5)


def test_sizes_of_a_released_model_are_its_preset(tmp_path: Path):
    with torch.device("meta"):
        released = TostVision(VisionConfig(preset="tost-vision-small-24", classes=10, patch_size=8))  # pyright: ignore[reportCallIssue]
    config, _ = from_released(tmp_path, to_released(released.state_dict())["model"])
    assert config == released.config


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"blocks.1.attn.temp": None}, r"lacks weights: blocks\.1\.attn\.temp; copy it again$"),
        ({"blocks.0.attn.temp": None}, r"lacks the weight blocks\.0\.attn\.temp; copy it again$"),
        ({"cls_token": None}, r"not a checkpoint of the released vision code: it has no weight cls_token;"),
        ({"blocks.0.attn.gate": torch.ones(2)}, r"unexpected weights: blocks\.0\.attn\.gate; give a model without"),
        ({"norm.bias": torch.ones(17)}, r"norm\.bias has shape \[17\], its settings say \[16\];"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_are_named(tmp_path: Path, change: dict[str, Any], problem: str):
    path, weights = tmp_path / "theirs.pth", {**their_weights(), **change}
    torch.save({name: weight for name, weight in weights.items() if weight is not None}, path)
    with pytest.raises((CheckpointError, ConfigError)) as error:
        read_released(path)
    assert re.search(problem, str(error.value)), error.value
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_damaged_and_other_files_are_refused(tmp_path: Path):
    path = tmp_path / "theirs.pth"
    torch.save(their_weights(), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"theirs\.pth: damaged, or not a file of torch\.save; copy it again"):
        load_vision(path)
    torch.save([1, 2], path)
    with pytest.raises(CheckpointError, match="it has no weight cls_token"):
        load_vision(path)
