"""A folder of the Hugging Face library: config.json, weights in one file or in several with an index, and perhaps a
tokenizer."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from tost_lm.errors import SHOWN, CheckpointError, printable
from tost_lm.files import regular_file
from tost_lm.model.config import MAX_LAYERS

CONFIG = "config.json"
SAFETENSORS, TORCH_FILE = "model.safetensors", "pytorch_model.bin"
"""The file of all weights; the index of several files has the suffix `.index.json`."""

HARMLESS = {
    "attn_implementation": ("eager", "sdpa"),
    "experts_implementation": ("eager", "grouped_mm", "batched_mm"),
    "quantization_config": (),
    "configuration_files": (),
    "transformers_weights": (),
}
"""Settings by which transformers loads kernels from the hub, runs other packages or reads other files, and their values
that do not."""
COUNT = re.compile(r"(.*_)?(n_layer|layers|depth|blocks|labels)")
"""Names of numbers of layers and of labels, which transformers makes one after the other."""


class _Index(BaseModel):
    weight_map: dict[str, Annotated[str, Field(pattern="^[^/]+$")]] = Field(min_length=1)


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings in a folder.

    Raises:
        CheckpointError: they are missing or damaged, or one would make transformers load code, read other files or
            build for hours.
    """
    path = folder / CONFIG
    try:
        tree = TypeAdapter(dict[str, Any]).validate_json(regular_file(path).read_bytes())  # limits the depth
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; give a folder of the Hugging Face library") from None
    except ValidationError:
        raise CheckpointError(f"{path}: damaged: not a JSON object; copy it again") from None
    _check(tree, path)
    return tree


def _check(settings: dict[str, Any] | list[Any], where: Path) -> None:
    """Refuse a setting at any depth, as `read_settings`."""
    for name, value in settings.items() if isinstance(settings, dict) else enumerate(settings):
        harmless = HARMLESS.get(str(name).removeprefix("_"))
        if harmless is not None and value is not None and value not in harmless:
            shown = printable(str(value))[:SHOWN]
            raise CheckpointError(
                f"{where}: unsupported {name}, for which transformers loads code or other files: {shown}; "
                "give a folder without it"
            )
        if COUNT.fullmatch(str(name)) and isinstance(value, int) and not 0 <= value <= MAX_LAYERS:
            raise CheckpointError(f"{where}: unsupported {name}: {value}; give a model with 0 to {MAX_LAYERS:,}")
        if isinstance(value, dict | list):
            _check(value, where)


def weight_files(folder: Path, names: Sequence[str] = (SAFETENSORS,)) -> list[Path]:
    """The files with the weights in a folder, and no others: those of the first of `names` that is there.

    Raises:
        CheckpointError: there are none, or not those that an index names.
        OSError: one is no regular file.
    """
    for name in names:
        whole, index = folder / name, folder / f"{name}.index.json"
        if index.is_file():
            files = {folder / file for file in _read_index(index).weight_map.values()}
        else:
            files = {whole} if whole.exists() else set()
        if files and whole.exists() and files != {whole}:
            raise CheckpointError(
                f"{folder}: weights of two models: {name}, and the files that {index.name} names; remove the older ones"
            )
        if missing := sorted(file for file in files if not file.exists()):
            raise CheckpointError(f"{missing[0]}: missing, but {index.name} names it; copy the folder again")
        if files:
            return sorted(map(regular_file, files))
    raise CheckpointError(
        f"{folder}: no {' and no '.join(names)}; load the model in transformers and write it with save_pretrained"
    )


def _read_index(path: Path) -> _Index:
    try:
        return _Index.model_validate_json(regular_file(path).read_bytes())
    except ValidationError:
        raise CheckpointError(f"{path}: damaged: no index of weights in this folder; copy it again") from None
