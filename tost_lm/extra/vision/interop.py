"""Checkpoints of the released vision code (arXiv 2412.17810), read and written; loading of image classifiers.

A file is a dictionary with the weights in `model`, or the weights alone. `module.` is before the names in a run on
several GPUs. No settings are stored: the sizes follow from the weights.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tost_lm.checkpointing.format import MODEL, StoredTensors, is_classifier, read_object
from tost_lm.checkpointing.run_folder import find_checkpoint
from tost_lm.config import validate
from tost_lm.errors import CheckpointError
from tost_lm.extra.vision.classifier import TostVision
from tost_lm.extra.vision.settings import VISION_PRESETS, VisionConfig
from tost_lm.interop.gpt2 import check_weights
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

VisionWeights = tuple[VisionConfig, dict[str, Tensor]]
"""Settings, and weights and batch-norm statistics by our names."""


def load_vision(path: str | Path, device: str = "cpu") -> TostVision:
    """Load an image classifier in evaluation mode. Nothing in a file is run.

    Args:
        path: a run folder (its newest valid checkpoint), a step folder, a model folder, or a checkpoint of the released
            vision code.

    Raises:
        CheckpointError: no such model, or a file is damaged.
    """
    source = Path(path)
    config, weights = read_released(source) if source.is_file() else _read_folder(source)
    with torch.device("meta"):
        model = TostVision(config)
    model.to_empty(device="cpu").load_state_dict(weights)
    return model.to(device).eval()


def read_released(path: Path) -> VisionWeights:
    """The model in a checkpoint of the released vision code.

    Raises:
        CheckpointError: it is damaged or not such a checkpoint.
        ConfigError: its sizes are inconsistent.
    """
    found = released_weights(read_torch_file(path))
    if found is None:
        raise CheckpointError(
            f"{path}: not a checkpoint of the released vision code: it has no weight {CLASS_TOKEN}; give one of these"
        )
    return from_released(path, found)


def released_weights(stored: Any) -> dict[str, Any] | None:
    """The weights in the content of a file, by their names; None if they are not of the vision code."""
    weights = stored.get("model", stored) if isinstance(stored, dict) else None
    if not isinstance(weights, dict):
        return None
    found = {str(name).removeprefix(PARALLEL): weight for name, weight in weights.items()}
    return found if CLASS_TOKEN in found else None


def from_released(path: Path, found: Mapping[str, Any]) -> VisionWeights:
    """The model of weights by their names; `path` is named in messages. Raises as `read_released`."""
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
    """The content of a checkpoint that the released vision code evaluates or fine-tunes; `weights` by our names."""
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


def _read_folder(source: Path) -> VisionWeights:
    folder = find_checkpoint(source)
    if not is_classifier(folder):
        raise CheckpointError(f"{folder}: a language model, not an image classifier; give the folder of a classifier")
    path = folder / MODEL
    return validate(VisionConfig, read_object(path), where=str(path)), dict(StoredTensors(folder, "model"))
