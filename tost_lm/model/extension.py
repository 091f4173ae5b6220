"""Context extension: settings and weights of a trained model for more positions.

Shape suffixes: P positions, X channels or heads.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tost_lm.config import leaves
from tost_lm.errors import ConfigError
from tost_lm.model.config import ExtensionConfig, ModelConfig

INTERPOLATED = "interpolated linearly: position p has the value at p · {old} / {new}"
CHOICES: dict[str, dict[str, str]] = {
    "positions": {
        "keep": "unchanged; new positions have the mean",
        "interpolate": INTERPOLATED,
        "sinusoidal": "replaced by sinusoidal positions, which are unlimited",
        "none": "removed",
    },
    "denom_bias": {
        "keep": "unchanged; new positions have the mean of each head",
        "interpolate": INTERPOLATED,
        "head": "the mean of each head at all positions, the constant that changes the scores least",
        "none": "removed",
    },
}
"""The effect of each choice of a setting on its table. Means are over the positions that were trained."""


def extended_config(old: ModelConfig, settings: ExtensionConfig) -> ModelConfig:
    """The settings of the extended model. Its context length stays that of its training.

    Raises:
        ConfigError: a line for each setting that is missing or has no effect.
    """
    problems = []
    changes: dict[str, Any] = {"max_positions": settings.max_positions}
    if old.position_limit is None:
        if settings.max_positions is not None:
            problems.append(
                f"extend.max_positions {settings.max_positions}: the model has no learned table of positions and reads "
                "sequences of any length; leave it out"
            )
        elif settings.rope_theta is None:
            problems.append(
                "nothing to extend: the model reads sequences of any length; set train.seq_len for training"
            )
        changes = {}
    elif settings.max_positions is None:
        problems.append(f"extend.max_positions: must be set, to more than the model's {old.max_positions}")
    elif settings.max_positions <= old.max_positions:
        problems.append(
            f"extend.max_positions {settings.max_positions} is not more than the model's {old.max_positions}; give more"
        )
    for name, choices in CHOICES.items():
        mode, no_table = getattr(settings, name), _no_table(old, name)
        if no_table is None and mode is None:
            listed = "; ".join(f"{choice} ({_filled_in(text, old, settings)})" for choice, text in choices.items())
            problems.append(
                f"extend.{name}: must be set, because the model has a learned table of {old.max_positions} positions; "
                f"choose {listed}. The logits of the first {old.max_positions} positions stay bitwise identical only "
                "with keep"
            )
        if no_table is not None and mode not in (None, "keep"):
            problems.append(f"extend.{name} {mode}: {no_table}, so there is nothing to change; leave it out")
        if mode not in (None, "keep", "interpolate"):
            changes |= {name: mode} if name == "positions" else {"tssa": old.tssa.model_copy(update={name: mode})}
    if settings.rope_theta is not None:
        if not old.rope_theta:
            problems.append(
                f"extend.rope_theta {settings.rope_theta:g}: the model has no rotary embedding; leave it out"
            )
        changes["softmax"] = old.softmax.model_copy(update={"rope_theta": settings.rope_theta})
    if problems:
        raise ConfigError("\n".join(problems))
    return old.model_copy(update=changes)


def extended_weights(weights: Mapping[str, Tensor], old: ModelConfig, settings: ExtensionConfig) -> dict[str, Tensor]:
    """The weights of the extended model by name; `extended_config` must accept the settings."""
    trained, positions = old.context_length, settings.max_positions or old.max_positions
    extended = {}
    for name in weights:
        weight = weights[name]
        if name == "positions.weight":
            weight = _extended_table(weight, trained, settings.positions, positions)
        elif name.endswith(".denom_bias") and weight.dim() == 2:
            weight = _extended_table(weight.T, trained, settings.denom_bias, positions)
            weight = weight.T.contiguous() if weight is not None and weight.dim() == 2 else weight
        if weight is not None:
            extended[name] = weight
    return extended


def _extended_table(old_PX: Tensor, trained: int, mode: str | None, positions: int) -> Tensor | None:
    """The table [positions, X] or, for `head`, [X]; None: removed.

    New positions, and with `head` all positions, have the mean of the trained ones. It has the least sum of squared
    differences to them: in the residual stream, and, because scores are linear in the bias, in the scores and in their
    differences between heads, which determine the memberships.
    """
    if mode == "interpolate":
        return _interpolated(old_PX, positions)
    if mode not in ("keep", "head"):
        return None
    mean_X = old_PX[:trained].double().mean(0).to(old_PX.dtype)
    return mean_X if mode == "head" else torch.cat([old_PX, mean_X.expand(positions - len(old_PX), -1)])


def _interpolated(old_PX: Tensor, positions: int) -> Tensor:
    """Position interpolation (arXiv 2306.15595); the last row is used beyond the last old position."""
    scaled = torch.arange(positions) * len(old_PX)
    left = scaled // positions
    right = (left + 1).clamp(max=len(old_PX) - 1)
    weight = ((scaled % positions).double() / positions)[:, None]
    return torch.lerp(old_PX[left].double(), old_PX[right].double(), weight).to(old_PX.dtype)


def extension_report(old: ModelConfig, new: ModelConfig, settings: ExtensionConfig) -> list[str]:
    """The changes, and what stays the same, in lines."""
    before, after = (f"{n:,} tokens" if n else "unlimited" for n in (old.position_limit, new.position_limit))
    lines = [f"{settings.folder}: sequence length {after} (before: {before})"]
    if old.position_limit is not None and old.context_length < old.max_positions:
        lines.append(
            f"only the first {old.context_length:,} of {old.max_positions:,} positions were trained; the rest have "
            "initial values"
        )
    for name, choices in CHOICES.items():
        no_table, mode = _no_table(old, name), getattr(settings, name)
        lines.append(f"{name}: " + (f"no change: {no_table}" if no_table else _filled_in(choices[mode], old, settings)))
    if old.rope_theta:
        change = "unchanged" if new.rope_theta == old.rope_theta else f"before: {old.rope_theta:g}"
        lines.append(
            f"rotary embedding: base {new.rope_theta:g} ({change}); the angles of positions from "
            f"{old.context_length:,} on were not trained"
        )
    kept = all(getattr(settings, name) in (None, "keep") for name in CHOICES) and new.rope_theta == old.rope_theta
    lines.append(
        f"the logits of the first {old.max_positions:,} positions are bitwise identical"
        if kept
        else "the logits have changed; continue training and evaluate"
    )
    before, after = (dict(leaves(model.model_dump(mode="json"))) for model in (old, new))
    words = " ".join(f"model.{name}={value}" for name, value in after.items() if value != before[name])
    return [*lines, f"to continue training: train.initial_weights={settings.folder} {words}"]


def _no_table(config: ModelConfig, name: str) -> str | None:
    """The reason why the model has no table of positions for a setting, or None."""
    if name == "positions":
        return None if config.positions == "learned" else f"model.positions is {config.positions!r}"
    if "T" not in config.pattern:
        return "the model has no T layers"
    chosen = config.tssa.denom_bias
    return None if chosen == "position" else f"model.tssa.denom_bias is {chosen!r}"


def _filled_in(text: str, old: ModelConfig, settings: ExtensionConfig) -> str:
    return text.format(old=old.max_positions, new=settings.max_positions)
