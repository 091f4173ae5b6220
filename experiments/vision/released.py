"""Checkpoints of the released vision code (arXiv 2412.17810), read and written.

A file is a dictionary with the weights in `model`, or the weights alone. `module.` is before the names in a run on
several GPUs. No settings are stored: the sizes follow from the weights.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.vision.classifier import TostVision
from experiments.vision.settings import VISION_PRESETS, VisionConfig
from tost_lm.config import validate
from tost_lm.errors import CheckpointError
from tost_lm.interop.authors import check_weights
from tost_lm.interop.torch_file import read_torch_file

NAMES = {
    "class_blocks.": "cls_attn_blocks.",
    "mixer_norm.": "norm1.",
    "mixer_scale.gamma": "gamma1",
    "mixer.in_proj.": "attn.qkv.",
    "mixer.temp": "attn.temp",
    "mlp_norm.": "norm2.",
    "mlp_scale.gamma": "gamma2",
    "mlp.in_proj.": "mlp.fc1.",
    "mlp.out_proj.": "mlp.fc2.",
    "positions.": "pos_embeder.token_projection.",
    "class_token": "cls_token",
}
"""Fragments of our names, and theirs."""
PARALLEL = "module."
CLASS_TOKEN, TEMP, HEAD = "cls_token", "blocks.0.attn.temp", "head.weight"
"""Weights whose shapes are the sizes of a model."""


def load_vision(path: str | Path, device: str = "cpu") -> TostVision:
    """The image classifier of a checkpoint of the released vision code, in evaluation mode. Nothing in a file is run.

    Raises:
        CheckpointError: the file is damaged or not such a checkpoint.
        ConfigError: its sizes are inconsistent.
    """
    config, weights = read_released(Path(path))
    with torch.device("meta"):
        model = TostVision(config)
    model.to_empty(device="cpu").load_state_dict(weights)
    return model.to(device).eval()


def read_released(path: Path) -> tuple[VisionConfig, dict[str, Tensor]]:
    """Settings, and weights and batch-norm statistics by our names. Raises as `load_vision`."""
    stored = read_torch_file(path)
    weights = stored.get("model", stored) if isinstance(stored, dict) else None
    if isinstance(weights, dict):
        weights = {str(name).removeprefix(PARALLEL): weight for name, weight in weights.items()}
    if not isinstance(weights, dict) or CLASS_TOKEN not in weights:
        raise CheckpointError(
            f"{path}: not a checkpoint of the released vision code: it has no weight {CLASS_TOKEN}; give one of these"
        )
    return from_released(path, weights)


def from_released(path: Path, found: Mapping[str, Any]) -> tuple[VisionConfig, dict[str, Tensor]]:
    """The model of weights by their names; `path` is named in messages. Raises as `load_vision`."""
    config = _config(path, found)
    with torch.device("meta"):
        ours = TostVision(config).state_dict()
    expected = {released_name(name): _released_shape(name, weight) for name, weight in ours.items()}
    check_weights(path, expected, found)
    return config, {
        name: found[released_name(name)].reshape(weight.shape).to(weight.dtype).contiguous()
        for name, weight in ours.items()
    }


def to_released(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """What `torch.save` writes to a file that the released vision code evaluates or fine-tunes; `weights`: a
    `state_dict`."""
    return {"model": {released_name(name): _released_shape(name, weights[name]) for name in weights}}


def released_name(name: str) -> str:
    """Their name of a weight or a statistic of ours."""
    if layer := re.fullmatch(r"embedding\.(convolutions|norms)\.(\d+)\.(\w+)", name):
        return f"patch_embed.proj.{2 * int(layer[2])}.{'01'[layer[1] == 'norms']}.{layer[3]}"
    output = "attn.proj." if name.startswith("class_blocks.") else "attn.to_out.0."
    for ours, theirs in {**NAMES, "mixer.out_proj.": output}.items():
        name = name.replace(ours, theirs)
    return name


def _released_shape(name: str, weight: Tensor) -> Tensor:
    """The class token is [1, 1, C] there, temp [H, 1], and the linear function of the positions a convolution."""
    if name == "class_token":
        return weight[None, None]
    if name == "positions.weight":
        return weight[..., None, None]
    return weight[:, None] if name.endswith(".temp") else weight


def _config(path: Path, found: Mapping[str, Any]) -> VisionConfig:
    """The settings that the weights imply."""
    for name in (CLASS_TOKEN, TEMP, HEAD):
        if not isinstance(found.get(name), Tensor) or not found[name].dim():
            raise CheckpointError(f"{path}: lacks the weight {name}; copy it again")
    sizes = {
        "layers": len({name.split(".")[1] for name in found if name.startswith("blocks.")}),
        "heads": found[TEMP].shape[0],
        "width": found[CLASS_TOKEN].shape[-1],
    }
    presets = [name for name, values in VISION_PRESETS.items() if sizes.items() <= values.items()]
    tree = {"preset": presets[0]} if presets else sizes
    convolutions = sum(bool(re.fullmatch(r"patch_embed\.proj\.\d+\.0\.weight", name)) for name in found)
    tree |= {"classes": found[HEAD].shape[0], "patch_size": 2**convolutions}
    return validate(VisionConfig, tree, str(path))
