"""A small image classifier learns with the released transforms: minutes, and it needs torchvision."""

import json
from pathlib import Path

import pytest
from image_folders import write_images
from programs import run

SETTINGS = """
[model]
layers = 2
heads = 2
width = 48
patch_size = 8
classes = 3
[data]
source = "images"
image_size = 32
workers = 1
[optim]
lr = 4e-3
min_lr = 0.0
[train]
epochs = 40
batch_size = 20
evaluate_every = 40
[run]
name = "stripes"
"""


def test_stripes_are_told_apart_after_training_on_augmented_images(tmp_path: Path):
    try:
        import torchvision  # noqa: F401  # pyright: ignore[reportMissingImports]
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"torchvision cannot be imported: {error}")
    write_images(tmp_path / "images", {"train": 40, "test": 40}, side=32)
    (tmp_path / "run.toml").write_text(SETTINGS)
    run("tost vision train", "run.toml", cwd=tmp_path)
    last = json.loads((tmp_path / "runs/stripes/validation.jsonl").read_text().splitlines()[-1])
    assert last["examples"] == 120
    assert last["top1"] > 0.9
