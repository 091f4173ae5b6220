"""A trained model that is to read longer sequences: what becomes of all that it has learned for each position.

Shape suffixes: P positions, X channels or heads.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tost_lm.errors import CheckpointError, ConfigError
from tost_lm.files import sha256_file
from tost_lm.model.checkpoint import (
    MANIFEST,
    StoredTensors,
    TokenizerFile,
    read_model_config,
    verify_checkpoint,
    write_checkpoint,
)
from tost_lm.model.config import ModelConfig
from tost_lm.model.extension_config import ExtensionConfig
from tost_lm.version import VERSION

RECORD = "extension.json"
"""The file of a model folder that says what it was made from, and how."""

STRETCHED = "stretched over the new length: position p has what p · {old} / {new} had, linear between two"
CHOICES: dict[str, dict[str, str]] = {
    "positions": {
        "keep": "its rows stay, and further positions have their mean",
        "interpolate": STRETCHED,
        "sinusoidal": "dropped for sines, which there are for any position",
        "none": "dropped for nothing",
    },
    "denom_bias": {
        "keep": "it stays, and further positions have the mean of each head",
        "interpolate": STRETCHED,
        "head": "each head's mean for any position, which of all such numbers moves the scores least",
        "none": "dropped for nothing",
    },
}
"""What becomes of each table, by the setting that says so. A mean is over the positions that were trained."""


def extend(source: Path, settings: ExtensionConfig, tokenizer: TokenizerFile) -> list[str]:
    """Write a checkpoint folder's model, made to read longer sequences, as a model folder; what to tell of it.

    A folder that this very extension has written already is left as it is.

    Raises:
        ConfigError: as `extended_config`, or something else is in the place of the folder.
        CheckpointError: what is there is damaged.
    """
    old, folder = read_model_config(source), settings.folder
    new = extended_config(old, settings)
    record = {
        "tost_lm": VERSION,
        "manifest_sha256": sha256_file(source / MANIFEST),
        "extend": settings.model_dump(mode="json", exclude={"folder"}),
    }
    if _is_there(folder, record):
        return [f"reusing {folder} (made from the same weights with the same settings)"]
    stored = StoredTensors(source, "model")

    def write_record(aside: Path) -> None:
        (aside / RECORD).write_text(json.dumps({**record, "source": str(source)}, indent=1))

    write_checkpoint(folder, new, extended_weights(stored, old, settings), tokenizer, write_record)
    return _account(old, new, settings, trained_positions(stored, old))


def extended_config(old: ModelConfig, settings: ExtensionConfig) -> ModelConfig:
    """The shape of the extended model.

    Raises:
        ConfigError: a line for each setting that is missing, or has nothing to change.
    """
    problems = []
    if settings.max_positions <= old.max_positions:
        problems.append(
            f"extend.max_positions {settings.max_positions}: the model's is {old.max_positions} already; give more"
        )
    changes: dict[str, Any] = {"max_positions": settings.max_positions}
    for name, choices in CHOICES.items():
        mode, missing = getattr(settings, name), _no_table(old, name)
        if missing is None and mode is None:
            listed = "; ".join(f"{choice} ({_filled_in(text, old, settings)})" for choice, text in choices.items())
            problems.append(
                f"extend.{name}: must be set, as the model has learned something for each of {old.max_positions} "
                f"positions: {listed}. With keep alone the logits of the first {old.max_positions} positions stay as "
                "they are, to the bit"
            )
        if missing is not None and mode not in (None, "keep"):
            problems.append(f"extend.{name} {mode}: {missing}, so there is nothing to change; leave it out")
        if mode not in (None, "keep", "interpolate"):
            changes[name] = mode
    if settings.rope_theta is not None:
        if not _turns(old):
            problems.append(
                f"extend.rope_theta {settings.rope_theta:g}: the model has no rotary embedding; leave it out"
            )
        changes["rope_theta"] = settings.rope_theta
    if problems:
        raise ConfigError("\n".join(problems))
    return old.model_copy(update=changes)


def extended_weights(weights: Mapping[str, Tensor], old: ModelConfig, settings: ExtensionConfig) -> dict[str, Tensor]:
    """The weights by name, those for each position treated as the settings say, which `extended_config` has passed."""
    trained = trained_positions(weights, old) or old.max_positions
    extended = {}
    for name in weights:
        weight = weights[name]
        if name == "positions.weight":
            weight = _extended_table(weight, trained, settings.positions, settings.max_positions)
        elif name.endswith(".denom_bias") and weight.dim() == 2:
            weight = _extended_table(weight.T, trained, settings.denom_bias, settings.max_positions)
            weight = weight.T.contiguous() if weight is not None and weight.dim() == 2 else weight
        if weight is not None:
            extended[name] = weight
    return extended


def trained_positions(weights: Mapping[str, Tensor], config: ModelConfig) -> int | None:
    """How many positions training has reached, as a denom_bias for each tells; None: nothing tells.

    Behind them it is 0 to the bit, as in the beginning: AdamW moves nothing without a gradient, and it does not decay.
    """
    if _no_table(config, "denom_bias"):
        return None
    reached_P = torch.stack([weights[name].any(0) for name in weights if name.endswith(".denom_bias")]).any(0)
    return int(reached_P.nonzero().max()) + 1 if reached_P.any() else None


def _extended_table(old_PX: Tensor, trained: int, mode: str | None, positions: int) -> Tensor | None:
    """The table [positions, X] or, for `head`, [X]; None: it is dropped.

    The mean of what was trained stands for a position that was not, or, with `head`, for each. It is nearest to the
    trained ones by the sum of squares: to what is added to the stream, and, scores being linear in the bias, to scores
    and to their differences between heads, which are all that memberships see.
    """
    if mode == "interpolate":
        return _stretched(old_PX, positions)
    if mode not in ("keep", "head"):
        return None
    mean_X = old_PX[:trained].double().mean(0).to(old_PX.dtype)
    return mean_X if mode == "head" else torch.cat([old_PX, mean_X.expand(positions - len(old_PX), -1)])


def _stretched(old_PX: Tensor, positions: int) -> Tensor:
    """Rows at P/positions of their distance (arXiv 2306.15595); behind the last old one, that one."""
    place = torch.arange(positions) * len(old_PX)
    left = place // positions
    right = (left + 1).clamp(max=len(old_PX) - 1)
    share = ((place % positions).double() / positions)[:, None]
    return torch.lerp(old_PX[left].double(), old_PX[right].double(), share).to(old_PX.dtype)


def _account(old: ModelConfig, new: ModelConfig, settings: ExtensionConfig, trained: int | None) -> list[str]:
    """What was done, what it promises, and how training goes on."""
    before, after = (f"{n:,} tokens" if n else "any length" for n in (old.position_limit, new.position_limit))
    lines = [f"{settings.folder}: reads {after}; the model that it is made from, {before}"]
    if trained is not None and trained < old.max_positions:
        lines.append(
            f"of the model's {old.max_positions:,} positions only the first {trained:,} were trained; behind "
            "them its tables are as in the beginning"
        )
    for name, choices in CHOICES.items():
        missing, mode = _no_table(old, name), getattr(settings, name)
        said = f"nothing to do: {missing}" if missing else f"{mode}: {_filled_in(choices[mode], old, settings)}"
        lines.append(f"{name}: {said}")
    if _turns(old):
        how = "stays" if new.rope_theta == old.rope_theta else f"was {old.rope_theta:g}"
        lines.append(
            f"rotary embedding: base {new.rope_theta:g} ({how}); positions from {old.max_positions:,} on turn by "
            "angles that were not trained"
        )
    kept = all(getattr(settings, name) in (None, "keep") for name in CHOICES) and new.rope_theta == old.rope_theta
    lines.append(
        f"the logits of the first {old.max_positions:,} positions are what they were, to the bit"
        if kept
        else "the logits are not what they were: train on, and measure"
    )
    changed = {name: getattr(new, name) for name in ("max_positions", "positions", "denom_bias", "rope_theta")
               if getattr(new, name) != getattr(old, name)}  # fmt: skip
    words = " ".join(f"model.{name}={value}" for name, value in changed.items())
    return [*lines, f"to train on: train.initial_weights={settings.folder} {words}"]


def _no_table(config: ModelConfig, name: str) -> str | None:
    """Why the model has no table for a setting; None: it has."""
    if name == "positions":
        return None if config.positions == "learned" else f"model.positions is {config.positions!r}"
    if "T" not in config.pattern:
        return "the model has no T layers"
    return None if config.denom_bias == "position" else f"model.denom_bias is {config.denom_bias!r}"


def _turns(config: ModelConfig) -> bool:
    return "A" in config.pattern and config.rope_theta > 0


def _filled_in(text: str, old: ModelConfig, settings: ExtensionConfig) -> str:
    return text.format(old=old.max_positions, new=settings.max_positions)


def _is_there(folder: Path, record: dict[str, Any]) -> bool:
    """Whether a folder is what this record tells of, whole."""
    if not folder.exists():
        return False
    try:
        found = json.loads((folder / RECORD).read_bytes())
        same = {name: found.get(name) for name in record} == record
    except (OSError, ValueError, AttributeError):
        same = False
    if not same:
        raise ConfigError(
            f"{folder}: exists, and is not what these settings make of this model; give another extend.folder"
        )
    try:
        verify_checkpoint(folder)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; remove {folder}, and it is made again") from None
    return True
