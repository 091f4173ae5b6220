"""Folders of small images whose classes differ in the direction of their stripes."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tost_lm.config import validate
from tost_lm.extra.vision.settings import VisionTrainConfig

CLASSES = ("columns", "rows", "squares")
MODEL = {"layers": 2, "heads": 2, "width": 32, "patch_size": 8, "classes": len(CLASSES)}


def write_images(folder: Path, counts: dict[str, int], side: int = 24) -> Path:
    """`counts[split]` images of each class in folder/split/class/."""
    draws = np.random.default_rng(0)
    for split, count in counts.items():
        for name in CLASSES:
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = _drawn(draws, name, side)
                Image.fromarray(pixels).save(folder / split / name / f"{number:03}.png")
    return folder


def _drawn(draws: np.random.Generator, name: str, side: int) -> np.ndarray:
    y, x = np.mgrid[:side, :side] + draws.integers(0, 8, (2, 1, 1))
    period = draws.integers(5, 9)
    on = {"columns": x % period < period / 2, "rows": y % period < period / 2}
    on["squares"] = on["columns"] ^ on["rows"]
    dark, light = draws.integers(0, 110, 3), draws.integers(145, 255, 3)
    return np.where(on[name][..., None], light, dark).astype(np.uint8)


def to_tensor(image: Any) -> Tensor:
    """Pixels between −1 and 1, [3, height, width]."""
    return torch.from_numpy(np.asarray(image, dtype=np.float32).copy()).permute(2, 0, 1) / 127.5 - 1


def flipped(image: Any) -> Tensor:
    """Flipped or not, as torch's generator decides."""
    pixels = to_tensor(image)
    return pixels.flip(2) if torch.rand(()) < 0.5 else pixels


def settings(**changes: dict[str, Any]) -> VisionTrainConfig:
    tree: dict[str, dict[str, Any]] = {
        "model": {**MODEL, "drop_path": 0.1},
        "data": {"source": "images", "workers": 0, "image_size": 24},
        "optim": {"lr": 3e-3, "min_lr": 0.0, "warmup_steps": 4, "weight_decay": 0.01},
        "train": {"epochs": 4, "batch_size": 10},
        "run": {"name": "run", "log_every": 1},
    }
    return validate(VisionTrainConfig, {name: {**tree[name], **changes.get(name, {})} for name in tree}, "test")
