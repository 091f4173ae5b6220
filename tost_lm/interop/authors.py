"""Checkpoints of the released language code (arXiv 2412.17810, a fork of nanoGPT).

Their train.py saves ckpt.pt by torch.save, a dictionary of:

    model          weights; `_orig_mod.` before the names in a compiled run; the tied head beside the embedding; causal
                   masks from old versions of PyTorch
    model_args     n_layer, n_head, n_embd, block_size, bias, vocab_size, dropout, TSSA
    iter_num       updates so far
    best_val_loss  nats per token of the validation set

and of what is not read here: the state of AdamW, and the settings of the run.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tost_lm.config import validate
from tost_lm.errors import CheckpointError
from tost_lm.inference.foreign_folder import listed
from tost_lm.interop.interface import ForeignFormat, ForeignModel
from tost_lm.interop.torch_file import read_torch_file
from tost_lm.model import ModelConfig
from tost_lm.model.lm import parameter_shapes

NAMES = {
    "blocks.": "h.",
    "mixer_norm.": "ln_1.",
    "mixer_scale.gamma": "gamma1",
    "mixer.in_proj.": "attn.c_attn.",
    "mixer.out_proj.": "attn.c_proj.",
    "mixer.": "attn.",
    "mlp_norm.": "ln_2.",
    "mlp_scale.gamma": "gamma2",
    "mlp.in_proj.": "mlp.c_fc.",
    "mlp.out_proj.": "mlp.c_proj.",
    "embedding.": "wte.",
    "positions.": "wpe.",
    "norm.": "ln_f.",
}
"""Fragments of our parameter names, and GPT-2's; a fragment comes before those that it contains."""
PREFIX, HEAD, MASKS = "transformer.", "lm_head.weight", (".attn.bias", ".attn.masked_bias")
"""Prefix of all names in a model with its head; the tied head; constants of old versions."""
SIZES = {
    "n_layer": "layers", "n_head": "heads", "n_embd": "width", "vocab_size": "vocab_size",
    "block_size": "max_positions", "bias": "bias",
}  # fmt: skip
"""Their arguments, and our settings."""
KNOWN_ARGS = {*SIZES, "dropout", "TSSA"}
MODELS: dict[str, dict[str, Any]] = {
    "T": {"tssa": {"denom_bias": "position"}},
    "A": {"softmax": {"rope_theta": 0.0}},
}
"""Our settings of their two models, by the letter of the mixer, and those of both."""
BOTH = {
    "positions": "learned", "norm": "layer", "norm_after": "", "mlp": "gelu", "gelu": "exact", "tied_head": True,
}  # fmt: skip
LAYER_SCALE = 1e-5
"""Its initial value; the trained one is among the weights."""
COMPILED = "_orig_mod."
NO_LOSS = 1e9
"""best_val_loss before the first validation."""


def read_authors(path: Path) -> ForeignModel:
    """Read a ckpt.pt without running anything in it.

    Raises:
        CheckpointError: it is damaged or not such a checkpoint, or its weights do not fit its sizes.
        ConfigError: its sizes are inconsistent.
    """
    stored = read_torch_file(path)
    for key in ("model", "model_args"):
        if not isinstance(stored, dict) or not isinstance(stored.get(key), dict):
            raise CheckpointError(f"{path}: not a checkpoint of the released code: it has no dictionary {key!r}")
    short_names = {name: str(name).removeprefix(COMPILED).removeprefix(PREFIX) for name in stored["model"]}
    found = {short: stored["model"][name] for name, short in short_names.items() if not short.endswith(MASKS)}
    if HEAD not in found:
        raise CheckpointError(f"{path}: lacks {HEAD}; give a checkpoint that train.py of the released code saved")
    config = _model_config(path, stored["model_args"], found)
    weights = _match_weights(path, config, found)
    iterations, nats = _number(stored.get("iter_num")) or 0, _number(stored.get("best_val_loss"))
    return ForeignModel(config, weights, int(iterations), None if nats == NO_LOSS else nats)


def check_weights(where: Path, expected: Mapping[str, Tensor], found: Mapping[str, Any]) -> None:
    """Compare the weights of a checkpoint with those that its settings imply, which may be on the meta device.

    Raises:
        CheckpointError: a weight is missing, unexpected, of another shape or of another kind of number.
    """
    if missing := [name for name in expected if name not in found]:
        raise CheckpointError(f"{where}: lacks weights: {listed(missing)}; copy it again")
    if unexpected := [str(name) for name in found if name not in expected]:
        raise CheckpointError(f"{where}: unexpected weights: {listed(unexpected)}; give a model without them")
    for name, wanted in expected.items():
        weight, is_floating = found[name], wanted.is_floating_point()
        if not isinstance(weight, Tensor) or weight.is_floating_point() != is_floating:
            kind = "a floating-point" if is_floating else "an integer"
            raise CheckpointError(f"{where}: {name} is not {kind} tensor; copy it again")
        if weight.shape != wanted.shape:
            raise CheckpointError(
                f"{where}: {name} has shape {list(weight.shape)}, its settings say {list(wanted.shape)}; copy it again"
            )


def gpt2_name(name: str) -> str:
    """GPT-2's name of a weight of ours, without PREFIX."""
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def _match_weights(where: Path, config: ModelConfig, found: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights of a model by our names, from those by theirs, in float32 and in our shapes.

    Raises:
        CheckpointError: a weight is missing, unexpected or of another shape, or the head is not tied to the embedding.
    """
    layers = len({name.split(".")[1] for name in found if name.startswith("h.")})
    if layers != config.layers:
        raise CheckpointError(f"{where}: its settings say {config.layers} layers, its weights {layers}; copy it again")
    shapes = parameter_shapes(config)
    theirs = {name: (*shape, 1) if _has_extra_dim(name) else shape for name, shape in shapes.items()}
    expected = {gpt2_name(name): torch.empty(shape, device="meta") for name, shape in theirs.items()}
    check_weights(where, expected, {name: weight for name, weight in found.items() if name != HEAD})
    if not torch.equal(found[HEAD], found["wte.weight"]):
        raise CheckpointError(f"{where}: {HEAD} differs from the token embedding; give a model with a tied head")
    return {name: found[gpt2_name(name)].float().reshape(shape).contiguous() for name, shape in shapes.items()}


def _model_config(path: Path, arguments: dict[str, Any], found: Mapping[str, Any]) -> ModelConfig:
    """The model settings that the arguments and the names of the weights describe."""
    where = Path(f"{path}: model_args")
    if missing := [name for name in SIZES if name not in arguments]:
        raise CheckpointError(f"{where}: lacks {', '.join(missing)}; add the model's values")
    if unknown := [name for name, value in arguments.items() if name not in KNOWN_ARGS and value]:
        raise CheckpointError(f"{where}: unknown option: {unknown[0]} {arguments[unknown[0]]!r}; train without it")
    is_tssa = any(name.endswith(".attn.temp") for name in found)
    if bool(arguments.get("TSSA", is_tssa)) != is_tssa:
        kind = "TSSA" if is_tssa else "softmax attention"
        raise CheckpointError(
            f"{where}: TSSA {arguments['TSSA']!r} contradicts the weights, which are of {kind}; copy the file again"
        )
    layer_scale = LAYER_SCALE if any(name.endswith(".gamma1") for name in found) else 0.0
    letter, sizes = "T" if is_tssa else "A", {ours: arguments[name] for name, ours in SIZES.items()}
    tree = {**BOTH, "pattern": letter, **MODELS[letter], **sizes, "layer_scale": layer_scale}
    return validate(ModelConfig, tree, str(where))


def _has_extra_dim(name: str) -> bool:
    """temp is [H, 1] there, denom_bias [H, positions, 1]."""
    return name.endswith((".temp", ".denom_bias"))


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    return float(value) if is_number and math.isfinite(value) else None


FORMAT = ForeignFormat(
    "ckpt.pt of the released code (arXiv 2412.17810)", (), read_authors, lambda source: read_authors(source).config,
    lambda source: None,
)  # fmt: skip
