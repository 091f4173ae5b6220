"""A folder of the Hugging Face library: config.json, model.safetensors or shards of it, and perhaps a tokenizer."""

import json
from pathlib import Path
from typing import Any

from tost_lm.errors import CheckpointError
from tost_lm.files import regular_file

CONFIG = "config.json"


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings in a folder. Raises CheckpointError: they are missing or damaged."""
    path = folder / CONFIG
    try:
        tree = json.loads(regular_file(path).read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; give a folder of the Hugging Face library") from None
    except ValueError:
        tree = None
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path}: damaged: not a JSON object; copy it again")
    return tree


def weight_files(folder: Path) -> list[Path]:
    """The files with the weights in a folder. Raises CheckpointError: there are none. OSError: one is no file."""
    if files := sorted(folder.glob("model*.safetensors")):
        return [regular_file(file) for file in files]
    raise CheckpointError(
        f"{folder}: no model.safetensors; load the model in transformers and write it with save_pretrained"
    )


def listed(names: list[str]) -> str:
    """Up to three names of weights, and the number of the others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"
