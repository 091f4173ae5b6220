"""Checkpoints of the released language code (arXiv 2412.17810, a fork of nanoGPT) to our weights, and back.

Their ckpt.pt is a dictionary that torch.save wrote. `model` holds the weights: with `_orig_mod.` before the names where
the model was compiled, the head beside the embedding that it is tied to, and from old versions of PyTorch the causal
masks. `model_args` holds the sizes, `iter_num` and `best_val_loss` say how far training came. No optimizer is read.
"""

import pickle
import re
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tost_lm.config import validate
from tost_lm.errors import CheckpointError, ConfigError
from tost_lm.files import discard_aside, folder_aside, publish_folder
from tost_lm.interop.gpt2 import HEAD, MASKS, PREFIX, SIZES, SOFTMAX, gpt2_name, matched, sizes
from tost_lm.model import ModelConfig

SIZES_HERE = {**SIZES, "block_size": "max_positions", "bias": "bias"}
"""Arguments of their model, and what ours are called."""
UNDERSTOOD = {*SIZES_HERE, "dropout"}
"""Dropout is a matter of training, and ours has none."""
TSSA = {"pattern": "T", "positions": "learned", "membership": "energy-share", "denom_bias": "position"}
MODELS = {"T": {**TSSA, "gelu": "exact"}, "A": {**SOFTMAX, "gelu": "exact"}}
"""What their two models compute, by the letter of the mixer."""
LAYER_SCALE = 1e-5
"""What it is in the beginning; what has become of it is in the weights."""
COMPILED = "_orig_mod."
NO_LOSS = 1e9
"""What stands for the best loss before there is one."""


class AuthorsModel(NamedTuple):
    """What a ckpt.pt tells of a model."""

    config: ModelConfig
    weights: dict[str, Tensor]
    """By our names, in float32."""
    iterations: int | None
    """Of its training; None: it does not say."""
    best_nats: float | None
    """Of a token of their validation set; None: it was not measured."""


def read_authors(path: Path) -> AuthorsModel:
    """The model in a ckpt.pt. Nothing that is in the file is run.

    Raises:
        CheckpointError: it is damaged or no checkpoint of theirs, or its weights are not those of its sizes.
        ConfigError: its sizes do not go together.
    """
    stored = _read(path)
    for key in ("model", "model_args"):
        if not isinstance(stored, dict) or not isinstance(stored.get(key), dict):
            raise CheckpointError(f"{path}: not a checkpoint of the released code: it holds no dictionary {key!r}")
    names = {name: str(name).removeprefix(COMPILED).removeprefix(PREFIX) for name in stored["model"]}
    found = {short: stored["model"][name] for name, short in names.items() if not short.endswith(MASKS)}
    if HEAD not in found:
        raise CheckpointError(f"{path}: lacks {HEAD}")
    config = _config(path, stored["model_args"], found)
    theirs = matched(path, config, found, lambda name, shape: (*shape, 1) if _has_a_dim_more(name) else shape)
    weights = {
        name: (weight.squeeze(-1) if _has_a_dim_more(name) else weight).contiguous() for name, weight in theirs.items()
    }
    iterations, nats = stored.get("iter_num"), _number(stored.get("best_val_loss"))
    iterations = iterations if isinstance(iterations, int) else None
    return AuthorsModel(config, weights, iterations, None if nats == NO_LOSS else nats)


def to_authors(config: ModelConfig, weights: Mapping[str, Tensor], iterations: int) -> dict[str, Any]:
    """What their code finds in a ckpt.pt; without an optimizer, so that it can sample and begin from it, not resume.

    Raises:
        ConfigError: the released code has no such model; a line for each setting.
    """
    kind = "A" if set(config.pattern) == {"A"} else "T"
    model = config.model_copy(update={"pattern": "".join(sorted(set(config.pattern)))})
    differing = {name: value for name, value in MODELS[kind].items() if getattr(model, name) != value}
    if differing:
        raise ConfigError(
            "\n".join(
                f"model.{name} {getattr(config, name)!r}: the released code has no such model, only {value!r}"
                for name, value in differing.items()
            )
        )
    theirs = {
        PREFIX + gpt2_name(name): weights[name][..., None] if _has_a_dim_more(name) else weights[name]
        for name in weights
    }
    if kind == "T" and not config.layer_scale:  # theirs always scales: by 1 then
        ones = torch.ones(config.width)
        theirs |= {f"{PREFIX}h.{layer}.gamma{branch}": ones for layer in range(config.layers) for branch in (1, 2)}
    theirs[HEAD] = theirs[f"{PREFIX}wte.weight"]
    arguments = {name: getattr(config, ours) for name, ours in SIZES_HERE.items()} | {"dropout": 0.0}
    return {"model": theirs, "model_args": arguments, "iter_num": iterations, "best_val_loss": NO_LOSS, "config": {}}


def write_authors(folder: Path, checkpoint: dict[str, Any]) -> None:
    """Write a folder with a ckpt.pt aside and rename it into place.

    Raises:
        CheckpointError: the system refuses; nothing is left of it.
    """
    try:
        aside = folder_aside(folder)
        with (aside / "ckpt.pt").open("wb") as file:
            torch.save(checkpoint, file)
        publish_folder(aside, folder)
    except (OSError, RuntimeError) as error:
        discard_aside(folder)
        refusal = error.__context__ if isinstance(error, RuntimeError) else error  # torch fails again as it closes
        if not isinstance(refusal, OSError):
            raise
        raise CheckpointError(f"{folder}: cannot be written: {refusal.strerror}") from None


def _read(path: Path) -> Any:
    """What torch.save wrote, of types that hold no code."""
    damaged = f"{path}: damaged, or not a file of torch.save: copy it again"
    if not zipfile.is_zipfile(path):
        raise CheckpointError(damaged)
    try:
        with zipfile.ZipFile(path) as archive:
            wrong = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise CheckpointError(f"{damaged} ({error})") from None
    if wrong:
        raise CheckpointError(f"{damaged} (the checksum of {wrong} is not right)")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        called = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"reading it would run {called[1]}" if called else "it is more than numbers and texts"
        raise CheckpointError(f"{path}: refused: {what}, which no weights need; nothing of it was run") from None
    except Exception as error:  # whatever a pickle that is none leads torch to
        raise CheckpointError(f"{damaged} ({type(error).__name__})") from None


def _config(path: Path, arguments: dict[str, Any], found: Mapping[str, Any]) -> ModelConfig:
    """Of the model that the sizes and the names of the weights tell of."""
    where = Path(f"{path}: model_args")
    tree = sizes(arguments, SIZES_HERE, where)
    if unknown := [name for name, value in arguments.items() if name not in UNDERSTOOD and value]:
        raise CheckpointError(f"{where}: {unknown[0]} {arguments[unknown[0]]!r}: an option that is not understood")
    kind = "T" if any(name.endswith(".attn.temp") for name in found) else "A"
    scaled = any(name.endswith(".gamma1") for name in found)
    return validate(ModelConfig, {**MODELS[kind], **tree, "layer_scale": LAYER_SCALE if scaled else 0.0}, str(where))


def _has_a_dim_more(name: str) -> bool:
    """temp is [H, 1] and denom_bias [H, positions, 1]."""
    return name.endswith((".temp", ".denom_bias"))


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    return float(value) if is_number else None
